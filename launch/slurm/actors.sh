#!/bin/bash
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}
# An actor of a run in each job of the array, written by `launch slurm`.
# More of them: sbatch --array=N-M with this file. Fewer: scancel JOB_[N-M].
set -eo pipefail
{% for line in setup %}
{{ line }}
{% endfor %}
set -u  # not before: scripts of modules and of conda read variables that are not set
launch=({{ launch }})
run={{ run }}
directory={{ directory }}

goes_on() {  # whether the learner's job runs or is queued; a Slurm that does not answer is no reason to end
  local found
  found=$(squeue --noheader --user="$SLURM_JOB_USER" --name="sluice-$run" 2> /dev/null) || return 0
  [[ -n $found ]]
}

stop() {  # the actor, which hands on what it does not finish
  [[ -z $actor ]] || kill -TERM "$actor" 2> /dev/null || true
  [[ -z $actor ]] || wait "$actor" || true
  actor=
}

actor= bus= told=
trap 'told=USR1' USR1  # the time limit is near
trap 'told=TERM' TERM  # Slurm ends the job, and has told the actor as well
while [[ -z $told ]] && goes_on; do
  now=$(cat "$directory/$run/slurm/bus" 2> /dev/null || true)
  if [[ -n $actor ]] && ! kill -0 "$actor" 2> /dev/null; then
    status=0
    wait "$actor" || status=$?
    [[ $status != @(0|2|65) ]] || exit $status  # the run is done, or a start would be useless
    actor=
  fi
  [[ -z $now || $now == "$bus" ]] || stop
  if [[ -n $now && -z $actor ]]; then
    bus=$now
    "${launch[@]}" actors --bus "$bus" --creds "$directory/keys/$run/actor.creds" --run "$run" \
      --directory "$directory" &
    actor=$!
  fi
  sleep {{ look_s }} &
  wait $! || true
done
if [[ $told == TERM ]]; then
  [[ -z $actor ]] || wait "$actor"
  exit
fi
stop
[[ -z $told ]] || exec scontrol requeue "$SLURM_JOB_ID"
