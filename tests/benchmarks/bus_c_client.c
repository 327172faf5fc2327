// The yardstick of `launch bench bus`: pipelined, deduplicated publishing with the C client.
// Usage: bench_c <url> <subject> <bytes> <seconds> <in flight>; prints megabytes per second.
#include <nats.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void check(natsStatus status, const char *what)
{
    if (status == NATS_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, natsStatus_GetText(status));
    exit(1);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int main(int count, char **arguments)
{
    if (count != 6)
        return 2;
    const char *subject = arguments[2];
    int size = atoi(arguments[3]);
    double limit = atof(arguments[4]);

    natsConnection *connection = NULL;
    check(natsConnection_ConnectTo(&connection, arguments[1]), "connect");
    jsOptions options;
    check(jsOptions_Init(&options), "options");
    options.PublishAsync.MaxPending = atoi(arguments[5]);
    jsCtx *stream = NULL;
    check(natsConnection_JetStream(&stream, connection, &options), "jetstream");

    char *data = malloc((size_t)size);
    for (int i = 0; i < size; i++)
        data[i] = (char)rand();

    char id[64];
    jsPubOptions each;
    check(jsPubOptions_Init(&each), "publish options");
    each.MsgId = id;
    long sent = 0;
    double began = seconds();
    while (seconds() - began < limit) {
        snprintf(id, sizeof(id), "%d-%ld", (int)getpid(), sent++);
        check(js_PublishAsync(stream, subject, data, size, &each), "publish");
    }
    jsPubOptions complete;
    check(jsPubOptions_Init(&complete), "completion options");
    complete.MaxWait = 30000;
    check(js_PublishAsyncComplete(stream, &complete), "complete");
    printf("%f\n", (double)sent * size / (seconds() - began) / 1e6);
    return 0;
}
