"""Kernels: what is fused, what is written of scores, and times that grow with the work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.capture import capture
from autopar.ir.errors import InputError
from autopar.ir.graph import BlockKind, evaluate
from autopar.ir.kernels import DEFAULT_KERNELS, parse_kernels
from autopar.ir.recompute import op_name
from autopar.solver.costs.fusion import node_styles
from autopar.solver.costs.kernels import Kernels
from autopar.solver.costs.products import Product
from autopar.solver.costs.work import (
    Attention,
    Work,
    backward_work,
    computing_nodes,
    forward_work,
    global_shapes,
)
from autopar.solver.hardware import Cluster
from tests.models import tiny_llama

A100 = Kernels(Cluster("a100-80gb").hardware)


@pytest.fixture(scope="module")
def layer() -> BlockKind:
    module, inputs = tiny_llama()
    model = capture(module, inputs)
    counts = model.multiplicity()
    return model.kinds[max(counts, key=lambda name: counts[name])]


def works(layer: BlockKind, kernels: str) -> dict[str, tuple[Work, Work]]:
    """Forward and backward of every op of a layer at two sequences."""
    styles = node_styles([layer], parse_kernels(kernels))
    found = {}
    for node in computing_nodes(layer):
        operands, results = (
            [tuple(evaluate(size, 2) for size in shape) for shape in shapes]
            for shapes in global_shapes(node)
        )
        style = styles[node]
        found[node.name] = (
            forward_work(node, operands, results, style=style),
            backward_work(node, operands, results, style=style),
        )
    return found


def total_bytes(layer: BlockKind, kernels: str) -> int:
    return sum(int(w.bytes) for pair in works(layer, kernels).values() for w in pair)


def test_a_fused_norm_reads_its_input_and_writes_its_result(layer):
    fused = works(layer, "flash_attention2 + fused norms")
    styles = node_styles([layer], parse_kernels("flash_attention2 + fused norms"))
    chains: list[list[str]] = [[]]
    for node in computing_nodes(layer):
        fused_op = styles[node].fused
        if fused_op is not None:
            if fused_op.is_first:
                chains.append([])
            chains[-1].append(node.name)
    assert len(chains[1:]) == 2, "a Llama layer has two norms"
    for chain in chains[1:]:
        assert "rsqrt" in " ".join(chain)
        assert sum(fused[name][0].num_kernels for name in chain) == 1
        product = next(n for n in computing_nodes(layer) if n.name == chain[-1])
        numel = 2
        for size in global_shapes(product)[1][0][1:]:
            numel *= size
        weight = global_shapes(product)[1][0][-1]
        itemsize = 4  # the tiny model is fp32
        moved = sum(fused[name][0].bytes for name in chain)
        assert moved == itemsize * (2 * numel + weight)


def test_a_residual_sum_is_no_part_of_a_norm(layer):
    styles = node_styles([layer], parse_kernels("flash_attention2 + fused norms"))
    sums = [n for n in computing_nodes(layer) if op_name(n) == "add" and len(n.args) > 1]
    residual = [n for n in sums if len(n.all_input_nodes) == 2 and "mlp" not in n.name]
    assert all(styles[n].fused is None for n in residual)


def test_the_more_is_fused_the_less_is_moved(layer):
    eager = total_bytes(layer, "flash_attention2")
    norms = total_bytes(layer, "flash_attention2 + fused norms")
    everything = total_bytes(layer, "flash_attention2 + fused pointwise")
    assert everything < norms < eager


def test_attention_kernels_in_the_order_of_what_they_write(layer):
    order = ("eager", "fused_softmax", "fused_causal_softmax", "flash_attention2")
    moved = [total_bytes(layer, kernels) for kernels in order]
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == len(moved)


def test_unfused_attention_computes_masked_scores_too(layer):
    (name,) = [n for n in works(layer, DEFAULT_KERNELS) if "attention" in n]
    flash = works(layer, "flash_attention2")[name][0].flops
    assert works(layer, "eager")[name][0].flops == 2 * flash


@pytest.mark.parametrize("text", ["flash", "flash_attention2 + fused", "", "eager + eager"])
def test_unknown_kernels_are_refused(text):
    with pytest.raises(InputError, match="no kernels are called"):
        parse_kernels(text)


def test_kernels_read_back_as_they_are_written():
    for text in ("eager", "flash_attention1 + fused norms + fused pointwise"):
        assert str(parse_kernels(text)) == text


SIZES = st.integers(1, 64).map(lambda n: 64 * n)


@given(rows=SIZES, columns=SIZES, depth=SIZES, batch=st.integers(1, 8), more=st.integers(1, 4))
def test_products_take_longer_when_they_are_larger(rows, columns, depth, batch, more):
    sizes = {"batch": batch, "rows": rows, "columns": columns, "depth": depth}
    seconds = A100.product_seconds(Product(itemsize=2, **sizes))
    for name, size in sizes.items():
        larger = Product(itemsize=2, **{**sizes, name: size * more})
        assert A100.product_seconds(larger) >= seconds * (1 - 1e-12)


@given(moved=st.integers(0, 10**9), more=st.integers(0, 10**9), num=st.integers(1, 20))
def test_moving_more_takes_longer_and_no_kernel_is_free(moved, more, num):
    seconds = A100.seconds(Work(bytes=moved, num_kernels=num))
    assert A100.seconds(Work(bytes=moved + more, num_kernels=num)) >= seconds
    assert seconds >= num * A100.hardware.chip.kernel_s
    assert A100.seconds(Work(bytes=moved, num_kernels=num, eager=True)) >= seconds


@given(heads=st.integers(1, 64), queries=SIZES, head_dim=st.sampled_from([64, 80, 96, 128]))
def test_flash_attention_1_is_slower_and_longer_sequences_take_longer(heads, queries, head_dim):
    def seconds(kernel, length):
        work = Attention(
            kernel=kernel,
            flops=4 * heads * length * length * head_dim,
            heads=heads,
            queries=length,
            head_dim=head_dim,
            itemsize=2,
        )
        return A100.attention_seconds(work, backward=False)

    assert seconds("flash_attention1", queries) > seconds("flash_attention2", queries)
    assert seconds("flash_attention2", 2 * queries) > seconds("flash_attention2", queries)


@pytest.mark.parametrize(("width", "share"), [(128, 1.0), (72, "aligned_8"), (75, "unaligned")])
def test_rows_that_do_not_tile_are_slow(width, share):
    efficiency = A100.hardware.efficiency
    expected = share if isinstance(share, float) else getattr(efficiency, share)
    assert A100.aligned_share(1024, width) == expected
