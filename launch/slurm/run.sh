#!/bin/bash
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}
# Bus, storage and learner of a run, written by `launch slurm`. A requeued job takes the run up again.
set -eo pipefail
{% for line in setup %}
{{ line }}
{% endfor %}
set -u  # not before: scripts of modules and of conda read variables that are not set
launch=({{ launch }})
run={{ run }}
directory={{ directory }}
bus_port=$((10000 + SLURM_JOB_ID % 10000 * 2))  # jobs that share a host have ports of their own
bus=nats://$(hostname):$bus_port
join() {  # ROLE COMMAND: the words by which a process joins the run
  words=("${launch[@]}" "$2" --bus "$bus" --creds "$directory/keys/$run/$1.creds" --run "$run")
  words+=(--directory "$directory")
}

again= ended=
# The learner's step saves a checkpoint.
trap 'again=yes; scancel --signal=USR1 "$SLURM_JOB_ID" || true' USR1
trap 'ended=yes; scancel --signal=USR1 "$SLURM_JOB_ID" || true' USR2  # the same, and the job ends
trap 'ended=yes' TERM  # Slurm ends the job, and has told every process
# On each node of the learner. Slurm signals every process of a step, and a learner's ranks that get SIGTERM
# from their agent as well would end at once: so USR1 reaches this shell, which tells the agent alone. SIGTERM
# to srun would kill its tasks.
on_node='(trap "" USR1; exec "$@" --node-rank "$SLURM_NODEID") & agent=$!
trap "kill -TERM $agent" USR1
wait $agent; status=$?
while kill -0 $agent 2> /dev/null; do wait $agent; status=$?; done
exit $status'

"${launch[@]}" bus --host 0.0.0.0 --port "$bus_port" --secure "$directory/keys" --run "$run" \
  --directory "$directory/$run/bus" &
bus_process=$!
until (: < "/dev/tcp/localhost/$bus_port") 2> /dev/null; do
  kill -0 $bus_process  # a bus that has ended will not listen, and ends the job
  sleep 1
done
join storage storage
begun="$directory/$run/slurm/begun"
: > "$begun"
"${words[@]}" --config "$directory/$run/slurm/settings.toml" &
storage=$!
# Storage writes the run's settings when it announces them. A learner that came before would join by those that
# the bus kept, which `launch slurm` may have changed since.
until [[ -n $again$ended || "$directory/$run/config.json" -nt $begun ]]; do
  kill -0 $storage 2> /dev/null || break  # the learner is waited for together with it, below
  sleep 1
done
status=0
if [[ -z $again$ended ]]; then  # else it would never be told
  join learner learner
  srun --kill-on-bad-exit=1 --cpu-bind=none bash -c "$on_node" learner "${words[@]}" \
    --master "$(hostname):$((bus_port + 1))" &
  learner=$!
  echo "$bus" > "$directory/$run/slurm/bus.new"
  mv "$directory/$run/slurm/bus.new" "$directory/$run/slurm/bus"

  wait -n $learner $storage $bus_process || status=$?  # without one of them the others would only wait
  while [[ -n $again$ended ]] && kill -0 $learner 2> /dev/null; do
    status=0
    wait $learner || status=$?
  done
fi
for process in $storage $bus_process; do
  kill -TERM $process 2> /dev/null || true
  wait $process || true
done
rm -f "$directory/$run/slurm/bus"
[[ -z $ended ]] || exit $status  # Slurm requeues the job itself if that is why it ends
finished='"state": "finished"'
if "${launch[@]}" runs show --run "$run" --directory "$directory" --json | grep -q "$finished"; then
  again=
elif ((status == 0)); then
  again=yes  # the learner was told by Slurm alone, as before a preemption
fi
[[ -z $again ]] || exec scontrol requeue "$SLURM_JOB_ID"
scancel --quiet --user="$SLURM_JOB_USER" --name="sluice-$run-actors"
exit $status
