#!/bin/sh
# One node of a Slurm allocation as a sublet host. Started by capacity.sbatch on every node, or by hand inside an allocation.
#
#   node.sh serve [COMMAND …]   a warden for this node, until it is told to leave; with a command, until that has ended
#   node.sh exec COMMAND …      a command on this node, beside the warden that serves it:
#                               srun --jobid=JOB --overlap --nodelist=NODE deploy/slurm/node.sh exec sublet run -- python train.py
#
# The host's name is the node's, and the home is node-local and outlives the allocation: the next warden on this node then settles, with proof,
# whatever the last one could not.
set -eu

: "${SUBLET_LEDGER:?set SUBLET_LEDGER to the postgresql:// address that all nodes share}"
case $SUBLET_LEDGER in
    postgres*://*) ;;
    *) echo "node.sh: SUBLET_LEDGER must be postgresql://…: a file is for one machine" >&2; exit 78 ;;
esac

SUBLET_HOST=${SLURMD_NODENAME:-$(hostname -s)}
SUBLET_HOME=${SUBLET_NODE_HOME:-/tmp/sublet-$(id -u)}/$SUBLET_HOST
export SUBLET_HOST SUBLET_HOME
mkdir -p -m 700 "${SUBLET_HOME%/*}" "$SUBLET_HOME"
[ -O "$SUBLET_HOME" ] || { echo "node.sh: $SUBLET_HOME is somebody else's; set SUBLET_NODE_HOME" >&2; exit 78; }

if [ -z "${SUBLET_DEVICES:-}" ]; then
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        # As Slurm numbers what it gave this job, whether or not it hides the rest.
        SUBLET_DEVICES=cuda:$(printf %s "$CUDA_VISIBLE_DEVICES" | tr , +)
    elif [ "${SLURM_MEM_PER_NODE:-0}" -gt 0 ]; then
        SUBLET_DEVICES=host:1x${SLURM_MEM_PER_NODE}MiB
    else
        SUBLET_DEVICES=auto
    fi
    export SUBLET_DEVICES
fi

verb=${1:-serve}
[ $# -eq 0 ] || shift
case $verb in
    exec) exec "$@" ;;
    serve) ;;
    *) echo "node.sh: '$verb' is neither serve nor exec" >&2; exit 2 ;;
esac

log=$SUBLET_HOME/warden-${SLURM_JOB_ID:-here}.log
: > "$log"
echo "sublet: $SUBLET_HOST offers $SUBLET_DEVICES; its warden writes to $log"
sublet warden --drain "${SUBLET_DRAIN:-20s}" 2>> "$log" &
warden=$!
command=
trap 'kill -TERM $warden $command 2>/dev/null || true' TERM INT

# A trap ends `wait`, not what is waited for.
ended() {
    while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
    wait "$1"
}

until grep -q "watching $SUBLET_HOST" "$log"; do
    kill -0 $warden 2>/dev/null || { cat "$log" >&2; ended $warden; exit 1; }
    sleep 0.1
done

code=0
if [ $# -gt 0 ]; then
    "$@" &
    command=$!
    ended $command || code=$?
    kill -TERM $warden 2>/dev/null || true
fi
ended $warden || { cat "$log" >&2; [ $code -ne 0 ] || code=1; }
tail -n 1 "$log"
exit $code
