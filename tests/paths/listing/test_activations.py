"""S19 Theorem 2: basis values and the signs of skeleton weights say what is active, and what is returned."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import ZOO, listed, mlp, of_each_kind, trace, traced

MANY = {  # paths
    *("deep residual", "small resnet", "stacked bidirectional rnn", "recurrent tower", "paddings"),
    *("stacked rnn", "pool twice", "characters", "dense block", "cnn 2d"),
}
SIGNED = {"tied characters", "tied autoencoder"}
SHOWN = [case for case in ZOO if case.name not in MANY | SIGNED and not case.normalizes]


def coordinates(network, rule="largest"):
    skeleton = ps.paths.skeleton(network, rule, generator=torch.Generator().manual_seed(3))
    return (
        skeleton,
        ps.paths.basis_values(network, skeleton),
        ps.paths.skeleton_signs(network, skeleton),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "rule"),
    [
        *of_each_kind(SHOWN, "largest"),
        *((case, rule) for case in SHOWN[:3] for rule in ("cyclic", "random")),
    ],
    ids=str,
)
def test_what_is_active_follows_from_basis_values_and_signs(case, rule):
    network = traced(case, torch.float64)[1]
    data = case.example(5, torch.float64, seed=2)
    skeleton, values, signs = coordinates(network, rule)
    before = ps.paths.activity(network, data)
    with torch.no_grad():
        for parameter in network.parameters.values():
            parameter.fill_(float("nan"))  # the weights are not looked at
    found = ps.paths.activity_from_values(network, skeleton, values, signs, data)
    # of every path, for nothing else is decided; a leak is a quotient, rounded
    paths = listed(case)
    assert_close(paths.active(found), paths.active(before), rtol=1e-11, atol=0)
    assert_close(found.outputs, before.outputs, rtol=1e-9, atol=1e-10)


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", of_each_kind(SHOWN), ids=str)
def test_the_weights_are_a_member_of_the_class_with_skeleton_weights_of_one(case):
    network = traced(case, torch.float64)[1]
    skeleton, values, signs = coordinates(network)
    weights = ps.paths.weights_from_values(network, skeleton, values, signs)
    graph, flat = skeleton.graph, skeleton.graph.flatten(weights)
    numbers = [graph.number(edge) for edge in skeleton.outgoing]
    assert flat[numbers].tolist() == signs.tolist()
    again = ps.paths.basis_values(network, skeleton, weights)
    for name, value in values.items():
        assert_close(again[name], value, rtol=1e-11, atol=1e-13, equal_nan=True)
    # the logarithms differ by a rescaling: by a combination of its directions, and by no sign
    own = graph.flatten(network.parameters).detach()
    used = ps.paths.used_edges(network) & (own != 0)
    assert torch.equal(own[used].sign() * flat[used].sign() > 0, (own * flat)[used] > 0)
    differences = (flat[used].abs().log() - own[used].abs().log())[:, None]
    directions = graph.exponents()[used]
    rest = (
        differences
        - directions @ torch.linalg.lstsq(directions, differences, driver="gelsd").solution
    )
    assert rest.abs().max() < 1e-9


def by_recursion(values, signs_of, layers, x):
    """Gates of a plain stack of layers, unit by unit, in path space alone: Z = sum H v / V, open where sign(B) Z > 0.

    Letters: v values of the basis paths, V those of the skeleton paths through each unit.
    """
    gates, H, V = [], x, [1.0] * len(x)
    for number, layer in enumerate(layers):
        Z = []
        for j in range(len(values[layer][0])):
            z = values[layer][1][j]
            for i, h in enumerate(H):
                z += h * values[layer][0][j][i] / V[i]
            Z.append(z)
        if number == len(layers) - 1:
            break
        gates += [signs_of[number][j] * z > 0 for j, z in enumerate(Z)]
        H, V = (
            [z * (signs_of[number][j] * z > 0) for j, z in enumerate(Z)],
            values[layers[number + 1]][2],
        )
    return gates, Z


@pytest.mark.parametrize("flip", [False, True])
def test_a_stack_of_layers_against_the_recursion_in_path_space(flip):
    torch.manual_seed(4)
    model = mlp(3, 4, 4, 2).double()
    network = ps.trace(model, torch.zeros(1, 3, dtype=torch.float64))
    skeleton, values, signs = coordinates(network)
    if flip:  # another network with the same basis values: other units are active
        signs = signs * torch.tensor([1, -1] * 4)
    number = {edge: c for c, edge in enumerate(skeleton.outgoing)}
    layers = ["0", "2", "4"]
    sign_of, above = {}, {}
    for layer in reversed(layers[1:]):  # sign(B_c), from the output on
        for (name, (row, unit)), c in number.items():
            if name == f"{layer}.weight":
                sign_of[layer, unit] = int(signs[c]) * above.get((layer, row), 1)
                above[layers[layers.index(layer) - 1], unit] = sign_of[layer, unit]
    signs_of = [[sign_of[layer, unit] for unit in range(4)] for layer in layers[1:]]
    plain = {}
    for layer in layers:
        v = values[f"{layer}.weight"].tolist()
        # V_c of the units below: the value at the skeleton edge that leaves them
        through = [
            next((v[r][u] for (n, (r, u)) in number if n == f"{layer}.weight" and u == unit), 1.0)
            for unit in range(len(v[0]))
        ]
        plain[layer] = (v, values[f"{layer}.bias"].tolist(), through)
    x = torch.randn(20, 3, dtype=torch.float64)
    found = ps.paths.activity_from_values(network, skeleton, values, signs, x)
    other = ps.paths.activity(network, x)
    assert torch.equal(found.gates, other.gates) is not flip
    for row, gates, outputs in zip(x.tolist(), found.gates, found.outputs, strict=True):
        known, out = by_recursion(plain, signs_of, layers, row)
        assert gates.bool().tolist() == known
        assert outputs.tolist() == pytest.approx(out, rel=1e-10)


@pytest.mark.parametrize("flip", [False, True])
def test_a_recurrent_network_against_the_recursion_in_path_space(flip):
    torch.manual_seed(5)
    rnn = nn.RNN(2, 3, nonlinearity="relu", batch_first=True).double()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = rnn, nn.Linear(3, 1).double()

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])

    network = ps.trace(Model(), torch.zeros(1, 4, 2, dtype=torch.float64))
    skeleton, values, signs = coordinates(network)
    if flip:
        signs = -signs
    unit_of = [edge[1][1] for edge in skeleton.outgoing]
    sign = {unit: int(signs[c]) for c, unit in enumerate(unit_of)}
    v = {
        name.rpartition(".")[2] if "rnn" in name else name: t.tolist() for name, t in values.items()
    }
    V = v["out.weight"][0]
    x = torch.randn(10, 4, 2, dtype=torch.float64)
    found = ps.paths.activity_from_values(network, skeleton, values, signs, x)
    for example, gates, outputs in zip(x.tolist(), found.gates, found.outputs, strict=True):
        H, known = [0.0] * 3, []
        for step in example:
            Z = [
                v["bias_ih_l0"][j]
                + v["bias_hh_l0"][j]
                + sum(step[i] * v["weight_ih_l0"][j][i] for i in range(2))
                + sum(H[k] * v["weight_hh_l0"][j][k] / V[k] for k in range(3))
                for j in range(3)
            ]
            H = [z * (sign[j] * z > 0) for j, z in enumerate(Z)]
            known += [sign[j] * z > 0 for j, z in enumerate(Z)]
        assert gates.bool().tolist() == known
        assert outputs.item() == pytest.approx(sum(H) + v["out.bias"][0], rel=1e-10)


def test_what_is_no_point_of_path_space_is_refused():
    network = traced(ZOO[0], torch.float64)[1]
    skeleton, values, signs = coordinates(network)
    with pytest.raises(ValueError, match="1 or -1 for each of the"):
        ps.paths.weights_from_values(network, skeleton, values, signs * 0)
    with pytest.raises(ValueError, match="1 or -1 for each of the"):
        ps.paths.weights_from_values(network, skeleton, values, signs[1:])
    zero = {name: torch.zeros_like(value) for name, value in values.items()}
    with pytest.raises(ValueError, match="path space has no coordinates there"):
        ps.paths.weights_from_values(network, skeleton, zero, signs)
    dead = traced(ZOO[0], torch.float64)[0]
    with torch.no_grad():
        next(dead.parameters())[0].zero_()
    network = trace(ZOO[0], dead)
    incomplete = ps.paths.skeleton(network)
    assert incomplete.incomplete
    with pytest.raises(ValueError, match="have no skeleton edges"):
        ps.paths.weights_from_values(network, incomplete, values, signs)


@pytest.mark.parametrize(
    "function", ["basis_values", "skeleton_signs", "weights_from_values", "activity"]
)
def test_values_by_name_are_those_of_the_networks_parameters(function):
    """The first value has as many elements as the parameter; the second would be expanded to its shape."""
    network = traced(ZOO[0], torch.float64)[1]
    skeleton, _, signs = coordinates(network)
    name, parameter = next(iter(network.parameters.items()))

    def found(values):
        if function == "activity":
            return ps.paths.activity(network, torch.zeros(2, 3), values)
        more = (signs,) if function == "weights_from_values" else ()
        return getattr(ps.paths, function)(network, skeleton, values, *more)

    for wrong in (parameter.t(), parameter[:1]):
        with pytest.raises(ValueError, match=f"'{name}' has shape .*, the network's"):
            found({**network.parameters, name: wrong})
    with pytest.raises(KeyError, match=f"lacks '{name}'"):
        found({n: p for n, p in network.parameters.items() if n != name})
