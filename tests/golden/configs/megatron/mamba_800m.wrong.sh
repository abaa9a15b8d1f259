# Numbers of NVIDIA/Megatron-LM examples/mamba/train.sh@d98e8a64ddf34856e74b24714e3bedb2f5a39553.
MODEL_SCALE="800M"
case "${MODEL_SCALE}" in
    "800M")
        TENSOR_MODEL_PARALLEL_SIZE=1
        GLOBAL_BATCH_SIZE=48
        ;;
    "8B")
        TENSOR_MODEL_PARALLEL_SIZE=4
        GLOBAL_BATCH_SIZE=8
        ;;
    *)
        exit 1
        ;;
esac
DATA_PATH=$1
SEQ_LEN=4096
TRAIN_SAMPLES=73242188
LR_WARMUP_SAMPLES=50000
LR_DECAY_SAMPLES=73192188

options=" \
       --tensor-model-parallel-size ${TENSOR_MODEL_PARALLEL_SIZE} \
       --pipeline-model-parallel-size 1 \
       --seq-length ${SEQ_LEN} \
       --train-samples ${TRAIN_SAMPLES} \
       --lr-warmup-samples ${LR_WARMUP_SAMPLES} \
       --lr-decay-samples ${LR_DECAY_SAMPLES} \
       --data-path ${DATA_PATH} \
       --micro-batch-size 4 \
       --global-batch-size ${GLOBAL_BATCH_SIZE} \
       --lr 2.5e-4 \
       --min-lr 2.5e-5 \
       --lr-decay-style cosine"

torchrun --nproc_per_node 8 ../../pretrain_mamba.py ${options}
