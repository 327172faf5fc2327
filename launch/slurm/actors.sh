#!/bin/bash
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}
# An actor of a run in each job of the array, written by `launch slurm`.
# More of them: sbatch --array=N-M with this file. Fewer: scancel --batch --signal=USR2 JOB_[N-M].
set -eo pipefail
{% for line in setup %}
{{ line }}
{% endfor %}
set -u  # not before: scripts of modules and of conda read variables that are not set
launch=({{ launch }})
run={{ run }}
directory={{ directory }}
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # the number of one of them is the whole array's as well
{% if nodes > 1 %}
rendezvous=$(hostname):$((10000 + SLURM_JOB_ID % 10000 * 2))
# On each node of the engine. SIGTERM to srun would kill its tasks: USR1 reaches this shell, which tells the
# actor. Slurm, when it ends the job, tells both.
on_node='trap : TERM
(trap "" USR1; exec "$@" --actors.engine.node-rank "$SLURM_NODEID") & actor=$!
trap "kill -TERM $actor" USR1
wait $actor; status=$?
while kill -0 $actor 2> /dev/null; do wait $actor; status=$?; done
exit $status'
{% endif %}

goes_on() {  # whether the learner's job runs or is queued; a Slurm that does not answer is no reason to end
  local found
  found=$(squeue --noheader --user="$SLURM_JOB_USER" --name="sluice-$run" 2> /dev/null) || return 0
  [[ -n $found ]]
}

stop() {  # the actor, which hands on what it does not finish
{% if nodes > 1 %}
  [[ -z $actor ]] || scancel --signal=USR1 "$job" || true
{% else %}
  [[ -z $actor ]] || kill -TERM "$actor" 2> /dev/null || true
{% endif %}
  [[ -z $actor ]] || wait "$actor" || true
  actor=
}

actor= bus= told=
trap 'told=USR1' USR1  # the time limit is near
trap 'told=USR2' USR2  # somebody ends the job, and Slurm kills nothing meanwhile
trap 'told=TERM' TERM  # Slurm ends the job, has told the actor as well, and kills it after KillWait
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
    words=("${launch[@]}" actors --bus "$bus" --creds "$directory/keys/$run/actor.creds" --run "$run")
    words+=(--directory "$directory")
{% if nodes > 1 %}
    srun --kill-on-bad-exit=1 --cpu-bind=none bash -c "$on_node" actor "${words[@]}" \
      --actors.engine.type sglang --actors.engine.rendezvous "$rendezvous" &
{% else %}
    "${words[@]}" &
{% endif %}
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
[[ $told != USR1 ]] || exec scontrol requeue "$job"
