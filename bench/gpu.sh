#!/usr/bin/env bash
# Everything that only a GPU can show, in one run: builds for one architecture, tests the kernels that the patches change,
# compares exact mode with stock, and prints a table of speeds. About 10 minutes on 16 cores and one card.
#
#     bench/gpu.sh [--arch 90] [--model FILE --low FILE] [--flash-attn] [--out build/gpu] [--jobs N] [--only STEPS]
#     bench/gpu.sh --no-gpu            the same steps on the CPU: tries this script, not the kernels
#
# --arch is the compute capability without the dot, the first card's by default. Without --model a model of random weights
# is made (bench/synth.py: 2.4 GB of experts; routing close to uniform, the worst case for a cache). Without --flash-attn
# no flash attention kernels are compiled, which is most of a CUDA build. Steps are build, model, ops, kernels, exact, table
# (--only build,ops). Each step's output is OUT/STEP.log; a step that fails is reported at the end, the others go on.
# No card's link can be slowed down from here: that part is measured on the simulated device.

set -euo pipefail
cd "$(dirname "$0")/.."

arch='' model='' low='' out=build/gpu jobs=$(nproc 2> /dev/null || echo 2) flash_attn=OFF gpu=yes
only=build,model,ops,kernels,exact,table

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }
die()   { echo "gpu.sh: error: $*" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --flash-attn) flash_attn=ON ;;
        --no-gpu)     gpu=no ;;
        -h|--help)    usage; exit 0 ;;
        --arch|--model|--low|--out|--jobs|--only)
            [ $# -gt 1 ] || die "$1 needs a value"
            printf -v "${1#--}" %s "$2"; shift ;;
        *) die "unknown option $1 (see --help)" ;;
    esac
    shift
done

for name in ${only//,/ }; do
    case $name in build|model|ops|kernels|exact|table) ;; *) die "--only: no step $name" ;; esac
done

if [ "$gpu" = yes ]; then
    command -v nvcc > /dev/null || die "no nvcc in PATH; --no-gpu tries the steps on the CPU"
    command -v nvidia-smi > /dev/null || die "no nvidia-smi; --no-gpu tries the steps on the CPU"
    [ -n "$arch" ] || arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    [ -n "$arch" ] || die "no card found; name its compute capability with --arch"
    device=CUDA0 ngl=99
else
    device=CPU ngl=0
    [ "$out" != build/gpu ] || out=build/gpu-none
fi
mkdir -p "$out"
out=$(realpath "$out")
bin=$out/bin
python=$PWD/.venv/bin/python
started=$SECONDS
failed=()

# step NAME FUNCTION: runs it unless --only leaves it out
step() {
    case ",$only," in *",$1,"*) ;; *) return 0 ;; esac
    local begin=$SECONDS status=0
    echo "== $1 (log: $out/$1.log)"
    # not in a condition, where a failing command would not end the step
    set +e
    (set -e; "$2") > "$out/$1.log" 2>&1
    status=$?
    set -e
    if [ $status -ne 0 ]; then
        failed+=("$1")
        tail -n 15 "$out/$1.log"
    fi
    echo "== $1: $([ $status -eq 0 ] && echo ok || echo "failed with status $status") after $((SECONDS - begin)) s"
}

do_build() {
    make .venv/.stamp-build
    local options=(-DHOBBIT_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Release)
    if [ "$gpu" = yes ]; then
        # native code of one architecture, and neither the kernels nor the libraries that no step uses
        options+=(-DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch-real" "-DGGML_CUDA_FA=$flash_attn" -DGGML_CUDA_NCCL=OFF)
    fi
    local generator=()
    if command -v ninja > /dev/null && ! [ -f "$out/CMakeCache.txt" ]; then generator=(-G Ninja); fi
    cmake -S . -B "$out" "${generator[@]}" "-DPython3_EXECUTABLE=$python" "${options[@]}"
    cmake --build "$out" -j "$jobs" --target llama-completion llama-quantize test-backend-ops test-mul-mat-id hobbit-exact
}

do_model() {
    if [ -z "$model" ] && ! [ -f "$out/Q8_0.gguf" ]; then
        "$python" bench/synth.py --like models/tiny-moe/tiny-moe-F16.gguf -o "$out/F16.gguf" --layers 12 --experts 64 --ff 768
        "$bin/llama-quantize" --pure "$out/F16.gguf" "$out/Q8_0.gguf.partial" Q8_0 "$jobs"
        "$bin/llama-quantize" --pure "$out/F16.gguf" "$out/Q4_0.gguf" Q4_0 "$jobs"
        mv "$out/Q8_0.gguf.partial" "$out/Q8_0.gguf"
        rm "$out/F16.gguf"
    fi
}

# negative ids and operations of two precisions against the CPU, then what upstream itself tests
do_ops() {
    "$bin/test-backend-ops" test -b "$device" -o MUL_MAT_ID_SKIP
    "$bin/test-backend-ops" test -b "$device" -o MUL_MAT_ID
}

# against the same operation without negative ids, bit for bit where one kernel computes both
do_kernels() {
    if [ "$gpu" = yes ]; then "$bin/test-mul-mat-id" "$device"; else "$bin/test-mul-mat-id"; fi
}

do_exact() {
    local high=models/tiny-moe/tiny-moe-F16.gguf
    # every layer is on the GPU by default
    for ubatch in 1 8 32 512; do
        "$bin/hobbit-exact" --model "$high" --cache min --ubatch "$ubatch" --prompt 64 --generate 64
    done
}

do_table() {
    local files=("${model:-$out/Q8_0.gguf}")
    if [ -n "$low" ]; then
        files+=(--low "$low")
    elif [ -z "$model" ]; then
        files+=(--low "$out/Q4_0.gguf")
    fi
    "$python" bench/gpu_table.py "${files[@]}" --bin "$bin" --ngl "$ngl" --threads "$((jobs < 8 ? jobs : 8))"
}

step build   do_build
step model   do_model
step ops     do_ops
step kernels do_kernels
step exact   do_exact
step table   do_table

if [ -f "$out/table.log" ]; then cat "$out/table.log"; fi
echo "== $((SECONDS - started)) s in all; $(git rev-parse --short HEAD 2> /dev/null || echo 'no commit')"
if [ ${#failed[@]} -gt 0 ]; then
    echo "== failed: ${failed[*]}"
    exit 1
fi
