# Numbers of NVIDIA/Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh@1afee592e85ac7994887eb5f4ef3998f76384333,
# on 128 machines.
GPUS_PER_NODE=8
NUM_NODES=128
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    --seq-length 2048 ${TRAINING_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]}
