"""What wrong calls say: what is wrong, where, and what to do. One line for each mistake that a user may make."""

import copy
import inspect
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pathspace as ps
from cases import mlp

X = torch.zeros(1, 4)
HALF = 0.5


def model():
    torch.manual_seed(0)
    return mlp(4, 8, 2)


def traced():
    made = model()
    return made, ps.trace(made, X)


def optimizer(kind="PathSGD", **options):
    made, network = traced()
    return getattr(ps.optim, kind)(made.parameters(), network, **options)


class Own(ps.optim.PathSGD):
    """Fixes options and hands on the others."""

    def __init__(self, parameters, network, **options):
        super().__init__(parameters, network, momentum=0.9, **options)


def optimizer_of_ones_own(**options):
    made, network = traced()
    return Own(made.parameters(), network, **options)


def stepped(kind="PathSGD", on=None, **options):
    found = optimizer(kind, **options)
    if on is not None:
        found.observe(on)
    for p in found.network.parameters.values():
        p.grad = torch.ones_like(p)
    found.step()
    return found


def without_units():
    made = nn.Linear(4, 1, bias=False)
    made.weight = nn.Parameter(torch.empty(0, 4))
    return nn.Sequential(made, nn.ReLU())


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return y if y.sum() > 0 else 2 * y


class Layers(nn.Module):
    """Two layers, put together by a function."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self._function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self._function(self, self.a(x).relu())


def dropped(m, h):
    return m.b(h * (torch.rand(len(h), 1) > HALF)) if m.training else m.b(h)


def on_data(function):
    made = Layers(function)
    return ps.paths.data_dependent_norm(ps.trace(made, X), X, alpha=HALF)


class Table(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)

    def forward(self, x):
        return self.a(x) * self.table


def step_on_meta(kind):
    made = model().to("meta")
    rule = getattr(ps.optim, kind)(made.parameters(), ps.trace(made, X))
    made(X.to("meta")).sum().backward()
    rule.step()


def with_nan():
    made, network = traced()
    with torch.no_grad():
        made[0].weight[0, 0] = torch.nan
    return network


def loading(into, state):
    found = optimizer(into)
    found.load_state_dict(state)


def wider():
    made = mlp(4, 9, 2)
    return ps.optim.PathSGD(made.parameters(), ps.trace(made, X))


def weight_normed():
    made = model()
    nn.utils.parametrizations.weight_norm(made[2])
    return made


def observed():
    made = model()
    made[0].register_forward_hook(lambda *_: None)  # as an observer is
    return made


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        return nn.functional.linear(x, self.scale * self.weight).relu()


MISTAKES = {
    # --- tracing
    "a gated layer alone": (
        lambda: ps.trace(nn.GRU(4, 4), torch.zeros(2, 1, 4), strict=True),
        "put that part into a module of its own and leave it to the plain rule with outside=",
    ),
    "a shape": (
        lambda: ps.trace(model(), (1, 4)),
        "give what the model is called with, not its shape",
    ),
    "a branch on data": (lambda: ps.trace(Branch(), X), "depends on the data"),
    "weight normalization": (
        lambda: ps.trace(weight_normed(), X, strict=True),
        r"remove_parametrizations.*or leave '2' to the plain rule with outside=\['2'\]",
    ),
    "a model prepared for quantisation": (
        lambda: ps.trace(observed(), X),
        "'forward hook' in module '0'.*trace before a quantizer prepares the model",
    ),
    "rows times a learned scale": (
        lambda: ps.trace(Scaled(), X, strict=True),
        "multiplies two parameters: what they make is no parameter.*one after the other",
    ),
    "a layer without units": (
        lambda: ps.trace(without_units(), X),
        r"'linear' in module '0': its weight of shape \(0, 4\) has no elements.*or leave its module outside",
    ),
    "a batch dimension too far": (
        lambda: ps.trace(model(), X, batch_dim=7),
        "batch_dim=7, but the first tensor of the example input has 2 dimensions",
    ),
    "states by a wrong name": (
        lambda: ps.trace(model(), X, states=["h"]),
        r"states=\['h'\] names no argument of the example input; its arguments are \[0\]",
    ),
    "a table of integers": (
        lambda: ps.trace(Table(torch.long), X),
        "parameter 'table' is of type torch.int64.*register_buffer",
    ),
    "complex weights": (
        lambda: ps.trace(Table(torch.cfloat), X),
        "parameter 'table' is of type torch.complex64",
    ),
    # --- a network is asked for
    "kappa of a model": (
        lambda: ps.paths.kappa(model()),
        r"got Sequential.*ps\.trace\(model, example_input\)",
    ),
    "the norm of a model": (
        lambda: ps.paths.squared_path_norm(model()),
        "needs a traced network, got Sequential",
    ),
    "rescaling a model": (
        lambda: ps.rescaling.rescale_(model(), torch.ones(8)),
        "needs a traced network, got Sequential",
    ),
    "rescaling by names": (
        lambda: ps.rescaling.rescale_(traced()[1], {"0": 2.0}),
        "factors must be a tensor of 8 numbers, one per class, got dict",
    ),
    "random rescaling of a model": (
        lambda: ps.rescaling.random_rescale_(model()),
        "needs a traced network, got Sequential",
    ),
    "balancing by no example": (
        lambda: ps.rescaling.balance_(traced()[1], X[:0]),
        "hold no number to compare: give one example at least",
    ),
    "balancing a model": (
        lambda: ps.rescaling.balance_(model()),
        "needs a traced network, got Sequential",
    ),
    "a skeleton of a model": (
        lambda: ps.paths.skeleton(model()),
        "needs a traced network, got Sequential",
    ),
    "paths of a model": (
        lambda: ps.paths.enumerate_paths(model()),
        "needs a traced network, got Sequential",
    ),
    "an example without a time step": (
        lambda: ps.trace(nn.RNN(4, 3, nonlinearity="relu", batch_first=True), torch.zeros(2, 0, 4)),
        "the example has no time step. Give one with as many as the data",
    ),
    "the rank of a network": (
        lambda: ps.paths.path_rank(traced()[1]),
        "needs the matrix of path_jacobian.*got Network",
    ),
    "activity of a model": (
        lambda: ps.paths.activity(model(), X),
        "needs a traced network, got Sequential",
    ),
    "dead units of a list": (
        lambda: ps.paths.dead_units([traced()[1]], X),
        "needs a traced network, got list",
    ),
    "a basis of a model": (
        lambda: ps.paths.basis_values(model(), ps.paths.skeleton(traced()[1])),
        "needs a traced network, got Sequential",
    ),
    "paths in the place of a skeleton": (
        lambda: ps.paths.express(
            *[n := traced()[1], ps.paths.enumerate_paths(n), ps.paths.skeleton(n)]
        ),
        r"skeleton must be one, from ps\.paths\.skeleton\(network\), got Paths",
    ),
    "dead units on no data": (
        lambda: ps.paths.dead_units(traced()[1], X[:0]),
        "the batch is empty",
    ),
    "degrees of freedom on no data": (
        lambda: ps.paths.degrees_of_freedom(traced()[1], X[:0]),
        "the batch is empty: give one example at least",
    ),
    "dead units on data with NaN": (
        lambda: ps.paths.dead_units(traced()[1], X * torch.nan),
        "outputs on the data are not finite: the data, or the weights, hold NaN",
    ),
    "a rate in the network's place": (
        lambda: ps.optim.PathSGD(model().parameters(), 0.1),
        "needs a traced network, got float",
    ),
    "a model in the network's place": (
        lambda: ps.optim.GSGD(model().parameters(), model()),
        "needs a traced network, got Sequential",
    ),
    # --- values by name
    "a missing parameter": (
        lambda: ps.paths.kappa(traced()[1], parameters={}),
        r"parameters lacks '0\.weight'",
    ),
    "a parameter of another shape": (
        lambda: ps.paths.squared_path_norm(
            traced()[1], parameters={**dict(model().named_parameters()), "2.weight": torch.ones(3)}
        ),
        r"'2\.weight' has shape \(3,\), the network's \(2, 8\)",
    ),
    "weights that are no numbers": (
        lambda: ps.rescaling.balance_(with_nan()),
        r"'0\.weight' is not finite",
    ),
    "weights without values": (
        lambda: ps.paths.kappa(ps.trace(model().to("meta"), X)),
        "on the meta device.*to_empty.*trace",
    ),
    "a balance of weights without values": (
        lambda: ps.rescaling.balance_(ps.trace(model().to("meta"), X)),
        "on the meta device.*to_empty.*trace",
    ),
    "paths of weights without values": (
        lambda: ps.paths.enumerate_paths(ps.trace(model().to("meta"), X)),
        "on the meta device.*to_empty.*trace",
    ),
    "a step of weights without values": (
        lambda: step_on_meta("PathSGD"),
        "on the meta device.*to_empty.*trace",
    ),
    "a step in path space without values": (
        lambda: step_on_meta("GSGD"),
        "on the meta device.*to_empty.*trace",
    ),
    "a step by data without values": (
        lambda: step_on_meta("DDPSGD"),
        "on the meta device.*to_empty.*trace",
    ),
    # --- batches
    "another way in training": (
        lambda: on_data(dropped),
        r"'linear' where tracing met 'mul'.*on data runs it in evaluation form: trace it in that form \(model.eval",
    ),
    "a step on an empty batch": (
        lambda: stepped("DDPSGD", on=X[:0]),
        r"the batch is empty: the first input has the shape \(0, 4\), whose dimension 0 holds the examples.*skip such",
    ),
    "a batch without its dimension": (
        lambda: ps.paths.data_dependent_norm(traced()[1], torch.tensor(1.0)),
        r"has the shape \(\), without the dimension 0 that held the examples when the model was traced",
    ),
    "gradients without names": (
        lambda: ps.paths.natural_gradient(traced()[1], torch.ones(1, 2), [torch.ones(1, 2)]),
        "gradients must be a mapping by parameter name, not a list",
    ),
    # --- options
    "a rule in invariant coordinates": (
        lambda: ps.optim.Invariant(traced()[0].parameters(), traced()[1], ps.optim.PathSGD),
        "rule must be a class of plain optimizers, like torch.optim.AdamW, not PathSGD",
    ),
    "a rate in quotes": (lambda: optimizer(lr="0.1"), "lr must be a number, got '0.1'"),
    "a rate of RMSprop in quotes": (
        lambda: optimizer("PathRMSprop", lr="1"),
        "lr must be a number, got '1'",
    ),
    "a momentum of Muon in quotes": (
        lambda: optimizer("PathMuon", momentum="1"),
        "momentum must be a number, got '1'",
    ),
    "a bound in quotes": (lambda: optimizer(clip_norm="1"), "clip_norm must be a number, got '1'"),
    "a bound of steps in quotes": (
        lambda: optimizer(clip_step="1"),
        "clip_step must be a number, got '1'",
    ),
    "a bound on path values in quotes": (
        lambda: optimizer("GSGD", clip_norm="1"),
        "clip_norm must be a number, got '1'",
    ),
    "a clamp in quotes": (lambda: optimizer("GSGD", clamp="2"), "clamp must be a number, got '2'"),
    "a rate of skeletons in quotes": (
        lambda: optimizer("GAdam", skeleton_rate="1"),
        "skeleton_rate must be a number, got '1'",
    ),
    "a seed of skeletons in quotes": (
        lambda: optimizer("GSGD", seed="1"),
        "seed must be a number, got '1'",
    ),
    "no share of the data": (
        lambda: optimizer("QuasiDiagonal", alpha=None),
        r"alpha must be in \(0, 1\], got None",
    ),
    "a mix in quotes": (lambda: optimizer("DDPSGD", alpha="1"), "alpha must be a number, got '1'"),
    "examples in quotes": (
        lambda: optimizer("DDPSGD", examples="half"),
        "examples must be a number or None, got 'half'",
    ),
    "a beta in quotes": (
        lambda: optimizer("PathAdam", betas=(0.9, "0.99")),
        r"betas must be two numbers in \[0, 1\), got \(0\.9, '0\.99'\)",
    ),
    "an infinite rate": (lambda: optimizer(lr=float("inf")), "lr must be finite"),
    "one beta": (
        lambda: optimizer("PathAdam", betas=0.9),
        r"betas must be two numbers in \[0, 1\), got 0\.9",
    ),
    "a refresh every 2.5 steps": (
        lambda: optimizer(refresh_every=2.5),
        "refresh_every must be a whole number, at least 1, got 2.5",
    ),
    "a basis never updated": (
        lambda: optimizer("PathSOAP", precondition_frequency=0),
        "precondition_frequency must be a whole number, at least 1, got 0",
    ),
    "half an iteration": (
        lambda: optimizer("PathMuon", ns_steps=HALF),
        "ns_steps must be a whole number",
    ),
    "sizes of a stack as a number": (
        lambda: ps.nn.StackedReLURNN(4, 8),
        r"hidden_sizes must be a sequence, one size per layer, got 8",
    ),
    "a mistyped option": (
        lambda: optimizer("PathMuon", momentm=0.9),
        "^PathMuon has no option 'momentm'; did you mean 'momentum'",
    ),
    "a mistyped option of the metric": (
        lambda: optimizer("DDPSGD", refresh_evry=10),
        "^DDPSGD has no option 'refresh_evry'; did you mean 'refresh_every'",
    ),
    "a mistyped option in path space": (
        lambda: optimizer("GSGD", skeletn="random"),
        "^GSGD has no option 'skeletn'; did you mean 'skeleton'",
    ),
    "a bound by the name that it has in PathSGD": (
        lambda: optimizer("PathAdam", clip_step=1.0),
        "^PathAdam has no option 'clip_step'; did you mean 'clip_norm'",
    ),
    "a name of another module": (
        lambda: ps.PathSGD,
        "^module 'pathspace' has no attribute 'PathSGD'; look in its modules: optim, rescaling",
    ),
    "a rate that is not a number": (
        lambda: optimizer(lr=float("nan")),
        "lr must not be negative or NaN, got nan",
    ),
    "an option of another optimizer": (
        lambda: optimizer(alpha=0.5),
        "^PathSGD has no option 'alpha'$",
    ),
    "a mistyped option of one's own optimizer": (
        lambda: optimizer_of_ones_own(refresh_evry=10),
        "^Own has no option 'refresh_evry'; did you mean 'refresh_every'",
    ),
    "a second term of data": (
        lambda: optimizer("DDPAdam", second_term=True),
        "^DDPAdam has no option 'second_term'$",
    ),
    "a second term of a metric of data": (
        lambda: ps.metrics.DataDependent(second_term=True),
        "^DataDependent has no option 'second_term'$",
    ),
    # --- states of other optimizers
    "SGD's state": (
        lambda: loading("PathSGD", torch.optim.SGD(model().parameters(), 0.1).state_dict()),
        "not the state of PathSGD: its groups lack 'path_decay'",
    ),
    "another rule's state": (
        lambda: loading("PathAdam", stepped().state_dict()),
        "not the state of PathAdam: its groups lack",
    ),
    "a state of plain moments": (
        lambda: around_adafactor().load_state_dict(plain_state(torch.optim.Adafactor)),
        "not the state of Invariant: .*has no gauge.*what Adafactor keeps has no known transformation: start",
    ),
    "a state of another plain rule": (
        lambda: loading(
            "PathRMSprop", with_options_of(torch.optim.RMSprop, plain_state(torch.optim.Adam))
        ),
        "not the state of PathRMSprop: .*has no gauge, and RMSprop keeps no 'exp_avg', 'exp_avg_sq': load a state of",
    ),
    "our state in a plain rule": (
        lambda: torch.optim.AdamW(model().parameters()).load_state_dict(
            stepped("PathAdam").state_dict()
        ),
        "state of an optimizer of pathspace, whose moments are in coordinates.*plain_state_dict",
    ),
    "a saved state in a plain rule": (
        lambda: torch.optim.AdamW(model().parameters()).load_state_dict(
            through_file(stepped("PathAdam").state_dict())
        ),
        "state of an optimizer of pathspace, whose moments are in coordinates.*plain_state_dict",
    ),
    "our SOAP as a plain rule's": (
        lambda: stepped("PathSOAP").plain_state_dict(),
        "what SOAP keeps has no known transformation",
    ),
    "a state of other shapes": (
        lambda: wider().load_state_dict(stepped().state_dict()),
        r"state of parameter 0 has a 'gauge_rows' of shape \(8, 1\), which does not fit '0\.weight' of shape \(9, 4\)",
    ),
    "a skeleton of another network": (
        lambda: ps.optim.GSGD(
            (other := nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))).parameters(),
            ps.trace(other, torch.zeros(1, 6)),
        ).load_state_dict(stepped("GSGD").state_dict()),
        "the skeleton of this state belongs to a network of .* weights and 8 unit classes, and this one has",
    ),
    # --- checking invariance
    "no optimizer": (
        lambda: ps.rescaling.check_invariance(
            model(), torch.randn(3, 4), torch.sum, lambda *_: None
        ),
        "make_optimizer must return an optimizer, got NoneType",
    ),
    "an optimizer in the place of a function": (
        lambda: checked(torch.optim.SGD(model().parameters(), 0.1)),
        "make_optimizer must be a function of a model and its network, such as lambda .* got SGD",
    ),
    "a class in the place of a function": (
        lambda: checked(torch.optim.SGD),
        "make_optimizer must be a function of a model and its network, such as lambda .* got SGD",
    ),
    "biases of a network": (
        lambda: ps.rescaling.correct_biases_(traced()[1], model(), X),
        "model must be an nn.Module, got Network: give network.model",
    ),
    "biases like those of a network": (
        lambda: ps.rescaling.correct_biases_(model(), traced()[1], X),
        "reference must be an nn.Module, got Network: give network.model",
    ),
    "absorbed biases of a network": (
        lambda: ps.rescaling.absorb_biases_(traced()[1], [], X),
        "model must be an nn.Module, got Network: give network.model",
    ),
    "bounds of a network": (
        lambda: ps.nn.scale_caps_(traced()[1], X),
        "model must be an nn.Module, got Network: give network.model",
    ),
    "loops of a network": (
        lambda: ps.nn.fast_(traced()[1]),
        "model must be an nn.Module, got Network: give network.model",
    ),
    "an image without a batch": (
        lambda: ps.trace(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.zeros(3, 8, 8)
        ),
        r"own forward fails on an example input with tensors of shape \(3, 8, 8\).*expected 4D input",
    ),
    "a forward that asserts": (
        lambda: ps.trace(Asserts(5, 2), X),
        "own forward fails on an example input .*Give an input that the model itself takes.*five of them",
    ),
    "a batch with its targets": (
        lambda: ps.trace(nn.Sequential(nn.Linear(5, 2)), (X, torch.zeros(len(X)))),
        "own forward fails on .*takes, without the targets of a batch. The error: .*takes 2 positional arguments but 3",
    ),
    "the number of an output": (
        lambda: ps.trace(nn.Sequential(nn.Linear(5, 2)), X, output=0),
        "output must be a function of what the model returns, such as lambda r: .*, got 0",
    ),
    "tokens that are real numbers": (
        lambda: ps.trace(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)), torch.zeros(2, 7)),
        "tokens of an integer type for an embedding, got torch.float32: give .*dtype=torch.long",
    ),
    "data of another form": (
        lambda: ps.paths.sensitivity(traced()[1], torch.zeros(2, 4, 1)),
        "expected a tensor of 2 dimensions with real numbers, got a tensor of 3 dimensions with real numbers. Give",
    ),
    "an optimizer of the model outside": (
        lambda: checked(lambda *_: torch.optim.SGD(model().parameters(), 0.1)),
        "holds no parameter of the model that make_optimizer was given: make it from that model",
    ),
    "nothing to rescale": (
        lambda: checked(adam, made=nn.Linear(4, 2)),
        "the network has no unit class: .* rescaled, and every optimizer would pass: Network.*0 unit classes",
    ),
    "no factor but one": (
        lambda: ps.rescaling.check_invariance(model(), X, torch.sum, adam, low=0.9, high=1.1),
        "is rescaled by nothing: low=0.9, high=1.1 and seed=0 draw no factor but 1, and every optimizer would pass",
    ),
    "a weight that a hook normalizes": (
        lambda: ps.trace(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.ReLU()), X),
        "'forward hook' in module '0'.*parametrizations.spectral_norm for the older one",
    ),
    "invariance of a network": (
        lambda: checked(adam, made=traced()[1]),
        "model must be an nn.Module, got Network: give network.model",
    ),
    "a batch of none": (
        lambda: checked(adam, x=X[:0]),
        "gives no output to compare: give one example at least",
    ),
    "a loss that is a number": (
        lambda: checked(adam, loss=lambda out: out.sum().item()),
        "loss must return a tensor of one number, got float",
    ),
    "a loss for each example": (
        lambda: ps.rescaling.check_invariance(
            model(),
            torch.randn(3, 4),
            lambda out: out,
            lambda m, n: ps.optim.PathSGD(m.parameters(), n),
        ),
        r"loss must return a tensor of one number, got one of shape \(3, 2\)",
    ),
}


class Asserts(nn.Linear):
    def forward(self, x):
        assert x.shape[1] == 5, "five of them"
        return super().forward(x)


def adam(made, network):
    return torch.optim.Adam(made.parameters(), 0.1)


def checked(make_optimizer, made=None, x=None, loss=torch.sum):
    made = model() if made is None else made
    x = torch.randn(3, 4) if x is None else x
    return ps.rescaling.check_invariance(made, x, loss, make_optimizer, steps=2)


def plain_state(rule):
    made = model()
    plain = rule(made.parameters())
    made(torch.ones(2, 4)).sum().backward()
    plain.step()
    return plain.state_dict()


def with_options_of(rule, state):
    options = {
        key: value for key, value in plain_state(rule)["param_groups"][0].items() if key != "params"
    }
    return {**state, "param_groups": [{**group, **options} for group in state["param_groups"]]}


def around_adafactor():
    made = model()
    return ps.optim.Invariant(made.parameters(), ps.trace(made, X), torch.optim.Adafactor)


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_says_what_is_wrong_and_what_to_do(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises(Exception, match=re.compile(message, re.DOTALL)):
        call()


def test_a_refused_state_changes_nothing():
    found = stepped(momentum=0.9)
    before = copy.deepcopy(found.state_dict())
    for state in (
        torch.optim.SGD(model().parameters(), 0.1).state_dict(),
        plain_state(torch.optim.Adam),
    ):
        with pytest.raises(ValueError, match="not the state of PathSGD"):
            found.load_state_dict(state)
    torch.testing.assert_close(found.state_dict(), before, rtol=0, atol=0)


SOURCE = Path(ps.__file__).parent
WITH_ERRORS = [
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r"^class \w+\(.*(Error|Exception)\b", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", WITH_ERRORS)
def test_errors_say_the_same_in_another_process(name):
    """One that cannot be unpickled would read as the death of the process in which it was raised."""
    module = pytest.importorskip(name, exc_type=ImportError)
    kinds = [k for k in vars(module).values() if isinstance(k, type) and issubclass(k, Exception)]
    own = [k for k in kinds if k.__module__ == name]
    assert own
    for kind in own:
        written = inspect.isfunction(kind.__init__)
        asked = list(inspect.signature(kind).parameters.values()) if written else []
        named = {p.name: False for p in asked if p.kind is p.KEYWORD_ONLY}
        error = kind(
            *([p.name for p in asked if p.name not in named] or ["what is wrong"]), **named
        )
        error.add_note("a note")
        there = pickle.loads(pickle.dumps(error))
        assert type(there) is kind
        assert (str(there), there.args) == (str(error), error.args)
        assert {n: str(v) for n, v in vars(there).items()} == {
            n: str(v) for n, v in vars(error).items()
        }
