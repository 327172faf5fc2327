#!/bin/bash
#SBATCH --job-name=sluice
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
# sbatch slurm.sh run.toml: bus, storage and learner on the first node, actors on the others. The directory must
# be on a shared disk. The same command takes the run up again, and so does a job that is requeued.
set -euo pipefail
config=$1
run=${SLUICE_RUN:-mine}
runs=${SLUICE_DIRECTORY:-$PWD/runs}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)  # reads all: pipefail ends on SIGPIPE
bus=nats://$head:4222
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head")

"${on_head[@]}" launch bus --host "$head" --secure "$runs/keys" --run "$run" --directory "$runs/$run/bus" &
bus_step=$!
until [[ -s $runs/keys/$run/storage.creds ]]; do
  kill -0 $bus_step  # a bus that has ended writes none, and ends the job
  sleep 1
done
keys=$runs/keys/$run
"${on_head[@]}" launch storage --bus "$bus" --creds "$keys/storage.creds" --run "$run" --directory "$runs" \
  --config "$config" &
storage_step=$!
others=$((SLURM_NNODES - 1))
srun --overlap --nodes=$others --ntasks=$others --exclude="$head" \
  launch actors --bus "$bus" --creds "$keys/actor.creds" --run "$run" --directory "$runs" &
"${on_head[@]}" --gpus-per-node=8 launch learner --bus "$bus" --creds "$keys/learner.creds" --run "$run" \
  --directory "$runs" --nproc 8 &
learner_step=$!

# The end of the time limit reaches the learner first: it saves a checkpoint.
told=
trap 'told=yes; kill -TERM $learner_step || true' TERM
status=0
wait -n $learner_step $storage_step $bus_step || status=$?  # without one of them the others would only wait
if [[ -n $told ]]; then
  status=0
  wait $learner_step || status=$?
fi
for step in $learner_step $storage_step $bus_step; do
  kill -TERM $step 2> /dev/null || true
  wait $step || true
done
exit $status
