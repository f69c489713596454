"""Short names of GPU kernels, equal for both sides of a comparison."""

from __future__ import annotations

import re

# The family of a kernel, by the first pattern that its name matches
FAMILIES = (
    ("triton (torch.compile)", r"^triton_"),
    ("convolution", r"fprop|dgrad|wgrad|conv(?!ert)|winograd|implicit_gemm|fft|mult_and_sum_complex"),
    ("layout of images", r"nchwToNhwc|nhwcToNchw|nchw_to_nhwc|nhwc_to_nchw"),
    ("matrix product", r"gemm|nvjet|cutlass|gemv|splitK"),
    ("batch normalization", r"batch_?norm|bn_(fw|bw)"),
    ("optimizer", r"multi_tensor_apply|[Ff]used_?(sgd|adam)|FusedSgd|FusedAdam"),
    ("pooling", r"pool"),
    ("softmax and loss", r"softmax|nll_loss"),
    ("reduction", r"reduce_kernel|Reduce|reduction"),
    ("elementwise", r"elementwise|CatArray|fill|Functor"),
)
DIRECTION = re.compile(r"fprop|dgrad|wgrad")
TYPES = re.compile(r"bf16|tf32|f16|f32|half|float|double")
SAME_TYPE = {"half": "f16", "float": "f32"}
FUNCTOR = re.compile(
    r"CUDAFunctor(?:OnSelf|OnOther)?_?(\w+)|(\w+?)(?:MathFunctor|Functor|_kernel_cuda|_kernel_impl|_kernel)"
)
NO_FUNCTORS = ("vectorized_elementwise_kernel", "unrolled_elementwise_kernel", "elementwise_kernel")
NCCL = re.compile(r"ncclDevKernel_(\w+?)(?:_(?:RING|TREE|NVLS|COLLNET|PAT)\w*)?\(")
WORDS = re.compile(r"[A-Za-z_]\w*")
MOST_LETTERS = 60


def kernel(name: str) -> tuple[str, str]:
    """Return the family of a kernel and its short name, without types of C++, tile sizes and numbers.

    An NCCL kernel keeps its collective and data type, not its protocol: all of them are called LL.
    """
    if found := NCCL.search(name):
        return "communication", f"nccl {found[1].replace('_', ' ')}"
    family = next((family for family, pattern in FAMILIES if re.search(pattern, name)), "other kernels")
    if family in ("convolution", "matrix product"):
        way = DIRECTION.search(name)
        types = TYPES.findall(name)
        kind = SAME_TYPE.get(types[0], types[0]) if types else ""
        return family, " ".join(filter(None, (family, way[0] if way else "", kind)))
    base = _base(name)
    if family == "elementwise" and (functor := _functor(name)):
        return family, "copy" if functor.endswith("copy") else functor
    if family.startswith("triton"):
        base = re.sub(r"_\d+\b", "", re.sub(r"^triton_(poi|red|per|tem|for)_", "triton ", base))
        return family, base.replace("fused_", "").replace("_", " ")[:MOST_LETTERS].strip()
    functor = _functor(name)
    return family, " ".join(filter(None, (base, functor)))[:MOST_LETTERS]


def _base(name: str) -> str:
    """Return the function's own name: no return type, namespaces, template arguments and arguments."""
    head = re.split(r"[<(]", name.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    return head.split()[-1].rpartition("::")[2] if head.split() else name


def _functor(name: str) -> str:
    """Return what an elementwise kernel computes, as far as its template arguments say so."""
    _, _, arguments = name.partition("<")
    for word in WORDS.findall(arguments):
        found = FUNCTOR.fullmatch(word)
        if found and word not in NO_FUNCTORS:
            return found[1] or found[2]
    return ""
