"""What a health server answers."""

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def numbers(text: str) -> dict[tuple[str, str], float]:
    """Samples by name and by the label that is neither the run nor the role."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    own = [(sample, set(sample.labels) - {"run", "role"}) for sample in samples]
    return {(s.name, ",".join(s.labels[label] for label in labels)): s.value for s, labels in own}
