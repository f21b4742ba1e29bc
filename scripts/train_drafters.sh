#!/usr/bin/env bash
# Text, features and all three drafters of one model, from nothing, in one go. With a GPU some ten
# minutes; on two CPU cores a day. Every part resumes: run it again after a stop.
#
#   scripts/train_drafters.sh                                    the default model
#   MODEL=Qwen/Qwen3-0.6B TOKENS=20000000 scripts/train_drafters.sh
#
# MODEL    default, a GGUF file, a model directory or a hub name
# TOKENS   answer tokens to write          ANCHORS  anchors that each drafter learns from
# BATCH    texts written at once           OUT      text, features and drafters go here
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-default}
TOKENS=${TOKENS:-5000000}
ANCHORS=${ANCHORS:-5000000}
OUT=${OUT:-runs/drafters}
RECIPES=checkpoints/smollm2-135m-instruct

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  BATCH=${BATCH:-512} DTYPE=bf16 AUTOCAST=bf16 PER_STEP=4096
else
  BATCH=${BATCH:-16} DTYPE=auto AUTOCAST=none PER_STEP=192
fi

dspark text "$MODEL" --out "$OUT/text" --tokens "$TOKENS" --batch "$BATCH"
for drafter in mtp1 dflash dspark; do
  dspark train "$RECIPES/$drafter.toml" \
    target.model="$MODEL" target.dtype="$DTYPE" \
    "text.files=[\"$OUT/text/text.jsonl\"]" features.directory="$OUT/features" \
    train.out="$OUT/$drafter" train.anchors="$ANCHORS" train.anchors_per_step="$PER_STEP" \
    train.autocast="$AUTOCAST" "$@"
done
