#!/usr/bin/env bash
# The whole story in one file: raw documents become an assistant. Read it from top to bottom; run it from any folder:
#
#     pip install -e ".[rl]" && scripts/story.sh
#
# It needs no GPU and downloads nothing: without anything else it takes documents, questions and answers that come with Python.
# With your own, on a GPU of 80 GB, it makes a model of a billion parameters:
#
#     SIZE=1b DOCS=manuals CHATS=chats.jsonl PAIRS=pairs.jsonl OUT=runs/mine scripts/story.sh
#
#   SIZE     tiny (minutes; does everything, learns nothing), small (35 minutes on a core of a laptop), 1b (days on a GPU of 80 GB)
#   DOCS     a folder of raw documents: HTML, Markdown, source code, wikis, WARC, jsonl         (docs/data.md)
#   CHATS    what the assistant should answer: a file or folder of jsonl, json, parquet         (docs/finetuning.md)
#   PAIRS    two answers to the same question, of which one is better                           (docs/finetuning.md)
#   ASK      what the assistant is asked in the end
#   OUT      the folder for everything that is made
#   USD_PER_HOUR                                   what the machine costs; a GPU's price is taken from configs/prices.toml
#   BASE_FLAGS, SFT_FLAGS, DPO_FLAGS, GRPO_FLAGS   more flags of a stage, such as --config.phases.accept=main after its gate
#
# Stop it, kill it, lose the machine: the same command goes on where it stopped. A stage that is done is passed over; delete
# OUT/took/STAGE to have it done again. A gate that fails ends it with exit code 3, bad input with 2, and a line that says why.
set -euo pipefail

SIZE=${SIZE:-small}
OUT=${OUT:-runs/story-$SIZE}
DOCS=${DOCS:-}
CHATS=${CHATS:-}
PAIRS=${PAIRS:-}
ASK=${ASK:-What does str.split do?}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

refuse() { # says what is wrong, in a line, before anything is done
  echo "story: $1" >&2
  exit 2
}
command -v jaxlm > /dev/null || refuse 'there is no jaxlm here: pip install -e ".[rl]" in the checkout'
[ -d "$OUT" ] || [ ! -e "$OUT" ] || refuse "OUT=$OUT is a file: name a folder"
[ -z "$DOCS" ] || [ -d "$DOCS" ] || refuse "DOCS=$DOCS: there is no such folder"
[[ "${USD_PER_HOUR:-0}" =~ ^[0-9]+(\.[0-9]*)?$ ]] || refuse "USD_PER_HOUR=$USD_PER_HOUR: a number, such as 2.7"
for given in "$CHATS" "$PAIRS"; do
  [ -z "$given" ] || [ -e "$given" ] || refuse "there is no file or folder $given"
done
python -c 'import importlib.util as i; exit(not i.find_spec("reasoning_gym"))' || refuse 'GRPO learns sums of reasoning-gym: pip install -e ".[rl]"'

# The same question to each model, so that the last page shows the answers side by side.
ask=(--config.sample.prompts="('${ASK//\'/\\\'}',)")

# What the sizes differ in: a few numbers. Every key has a comment: jaxlm train --help=SECTION, or configs/base.py.
task="reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1" # two numbers of one digit each
docs=() chats=() sums=() plan=() base=() eval=() sft=() dpo=() grpo=()
case $SIZE in
  tiny)
    config=$here/story_base.py
    docs=(--megabytes=0.5) chats=(--megabytes=0.3) sums=(--count=100)
    plan=(--config.plan.measure=never)
    base=(--config.model.n_layers=2 --config.model.d_model=64 --config.model.d_ff=128 --config.train.steps=120
      --config.train.batch_size=4 --config.train.seq_len=128 --config.train.eval_every_steps=60 --config.log.every_steps=20
      --config.phases.plan.smoke.steps=30 --config.phases.plan.main.steps=90 --config.phases.plan.finish.steps=120
      "${ask[@]}")
    eval=(--limit=4)
    sft=(--config.train.steps=60 --config.train.seq_len=128 --config.train.eval_every_steps=30 --config.log.every_steps=20
      --config.optim.warmup_steps=5 --config.optim.lr=5e-3 --config.sample.max_new_tokens=32)
    dpo=(--config.train.steps=10 --config.train.batch_size=8 --config.train.seq_len=128 --config.train.eval_every_steps=5
      --config.optim.warmup_steps=2 --config.optim.lr=1e-4 --config.sample.max_new_tokens=32)
    grpo=(--config.train.steps=5 --config.train.batch_size=16 --config.train.seq_len=256 --config.rollout.max_new_tokens=4
      --config.train.eval_every_steps=0 --config.optim.warmup_steps=1 --config.optim.lr=1e-3 --config.sample.max_new_tokens=32
      --config.eval.max_examples=32)
    ;;
  small)
    config=$here/story_base.py
    base=("${ask[@]}")
    sft=(--config.train.seq_len=256 --config.optim.lr=1e-3 --config.sample.max_new_tokens=48)
    dpo=(--config.train.steps=150 --config.train.seq_len=256 --config.optim.lr=3e-5 --config.sample.max_new_tokens=48)
    grpo=(--config.train.steps=250 --config.train.batch_size=8 --config.train.seq_len=384 --config.rollout.max_new_tokens=8
      --config.optim.lr=3e-5 --config.log.every_steps=10 --config.sample.max_new_tokens=48
      --config.eval.max_examples=256)
    ;;
  1b)
    [ -n "$DOCS" ] && [ -n "$CHATS" ] && [ -n "$PAIRS" ] || refuse 'SIZE=1b learns from your own: DOCS=FOLDER CHATS=FILE PAIRS=FILE'
    config=gpuburnout_1b # its phases have budgets in dollars, which need a price; it has prompts of its own
    task="reasoning_gym:chain_sum" # two to six numbers of up to four digits
    sums=(--count=2000)
    sft=(--config.train.seq_len=2048) dpo=(--config.train.seq_len=2048 --config.train.microbatch_size=8)
    grpo=(--config.train.microbatch_size=16)
    ;;
  *) refuse "SIZE=$SIZE: tiny, small or 1b" ;;
esac
python "$here/story_data.py" flags "$config" # a typo is told now, not at its stage
USD_PER_HOUR=${USD_PER_HOUR:-$(python "$here/story_data.py" price)}
[ "$SIZE" != 1b ] || [[ "$USD_PER_HOUR" =~ [1-9] ]] || refuse 'SIZE=1b has budgets in dollars: USD_PER_HOUR=PRICE, what this machine costs'
price=(--config.hardware.usd_per_hour="$USD_PER_HOUR") # every run counts its dollars; 0 = nobody knows
read -ra more_base <<< "${BASE_FLAGS:-}" && read -ra more_sft <<< "${SFT_FLAGS:-}"
read -ra more_dpo <<< "${DPO_FLAGS:-}" && read -ra more_grpo <<< "${GRPO_FLAGS:-}"

mkdir -p "$OUT/took"
stage() { # runs a command once; keeps in OUT/took/NAME how many seconds it took
  local name=$1 began=$SECONDS
  shift
  [ ! -e "$OUT/took/$name" ] || return 0
  printf '\n== %s\n' "$name" && printf '%q ' "$@" && echo
  "$@"
  echo $((SECONDS - began)) > "$OUT/took/$name"
}

# 1. Raw documents. Yours, or pages, READMEs and sources that come with Python.
if [ -z "$DOCS" ]; then
  DOCS=$OUT/documents
  stage 01-documents python "$here/story_data.py" docs "$DOCS" "${docs[@]}"
fi

# 2. Documents to clean text: menus and notices go, copies go, personal data is masked. OUT/data/report.html shows what went.
stage 02-prepare jaxlm prepare "$DOCS" --out="$OUT/data"

# 3. Text to tokens: a tokenizer of its own, shards, a manifest that has the hash of everything.
stage 03-tokenize jaxlm tokenize "$config" --config.data.dir="$OUT/data"

# 4. What will it take? Memory, hours and dollars, on this machine and on rented ones, before they are spent.
stage 04-plan jaxlm plan "$config" --config.data.dir="$OUT/data" "${base[@]}" "${plan[@]}"

# 5. Pretraining: the model learns to continue text. In phases, each with a gate and a budget: `phases.plan` in the config.
stage 05-base jaxlm train "$config" --config.workdir="$OUT/base" --config.data.dir="$OUT/data" \
  "${base[@]}" "${price[@]}" "${more_base[@]}"

# 6. How good is it? Held-out loss, and the red team's questions, which come with jaxlm.
red_team=(--tasks=redteam --config.eval.redteam.toxicity=False "${eval[@]}")
stage 06-eval jaxlm eval "$OUT/base" "${red_team[@]}"

# 7. Examples: chats, and pairs of answers. Some chats are sums with their answers, so that step 10 has something to start from.
mkdir -p "$OUT/examples/chats"
made=$OUT/examples/made
if [ -z "$CHATS" ] || [ -z "$PAIRS" ]; then
  stage 07-examples python "$here/story_data.py" chats "$made" "${chats[@]}"
fi
stage 07-sums python "$here/story_data.py" sums "$OUT/examples/chats/sums.jsonl" --task="$task" "${sums[@]}"
[ -n "$CHATS" ] || { CHATS=$made/chats.jsonl && sft+=(--config.examples.val_path="$made/held_out/chats.jsonl"); }
[ -n "$PAIRS" ] || { PAIRS=$made/pairs.jsonl && dpo+=(--config.examples.val_path="$made/held_out/pairs.jsonl"); }
ln -sfn "$(realpath "$CHATS")" "$OUT/examples/chats/yours-$(basename "$CHATS")"

# 8. SFT: it learns to answer, and to stop. Of your chats one of twenty is held out.
stage 08-sft jaxlm train sft --config.workdir="$OUT/sft" --config.origin="$OUT/base" \
  --config.data.path="$OUT/examples/chats" "${price[@]}" "${ask[@]}" "${sft[@]}" "${more_sft[@]}"

# 9. DPO: of two answers it learns to give the better one. Look at val/accuracy: 0.5 is chance.
stage 09-dpo jaxlm train dpo --config.workdir="$OUT/dpo" --config.origin="$OUT/sft" \
  --config.data.path="$PAIRS" "${price[@]}" "${ask[@]}" "${dpo[@]}" "${more_dpo[@]}"

# 10. GRPO: it answers sums, eight times each, and learns from which answers were right. Look at val/reward.
stage 10-grpo jaxlm train grpo --config.workdir="$OUT/grpo" --config.origin="$OUT/dpo" \
  --config.reward.tasks="$task" "${price[@]}" "${ask[@]}" "${grpo[@]}" "${more_grpo[@]}"

# 11. The red team again: the page of the last run has both beside each other.
stage 11-eval jaxlm eval "$OUT/grpo" "${red_team[@]}"

# 12. For others: a folder that transformers loads; the model card says what it was made of and what it cost.
stage 12-export jaxlm export "$OUT/grpo" --to=hf --out="$OUT/hf"

# 13. The report card: one page with what every stage changed, and what each command took, in time and dollars.
printf '\n== report\n'
jaxlm report "$OUT/grpo" --took="$OUT/took"

# 14. Talk to it.
printf '\n== jaxlm chat %s\n' "$OUT/grpo"
jaxlm chat "$OUT/grpo" --message="$ASK" --temperature=0
