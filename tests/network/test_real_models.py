"""Models as their libraries build them, small and with random weights: traced whole, and blind to scales.

Nothing is downloaded. The numbers of unit classes are counted by hand: of an attention, one for
each dimension of the values of a head, and one for each of its queries and keys; one for each
hidden unit between the two weights of a ReLU or of the linear side of a gate; one for each gain of
a norm that nothing but weights reads.
"""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import pathspace as ps

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning"
    ),  # of the libraries, while they are imported
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
]
WORDS = torch.arange(14).reshape(2, 7) * 4
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GATE = {"intermediate_size": 24}
PLACES = {"intermediate_size": 24, "max_position_embeddings": 32}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
BLOCK = 16 + 16  # values, and queries with keys, of an attention of width 16


def library(name):
    """A library, or a skipped test where it is missing."""
    return pytest.importorskip(name, reason=f"{name} is not installed (pip install -e '.[tools]')")


def build(name, inputs=None, head="ForCausalLM", **options):
    """A model of `transformers`, by the name that its classes begin with."""
    tf = library("transformers")
    model = getattr(tf, name + head)(getattr(tf, f"{name}Config")(**options)).eval()
    return model, {"input_ids": WORDS} if inputs is None else inputs


def masked(builder):
    """With a mask, of which the library's code asks whether it masks anything."""
    model, inputs = builder()
    return model, inputs | {"attention_mask": MASK}


def gpt2():
    tf = library("transformers")
    config = tf.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **SPECIAL)
    return tf.GPT2LMHeadModel(config).eval(), {"input_ids": WORDS}


def llama():
    """Two heads of queries share one of keys and values, whose dimensions the rotary embedding turns by pairs."""
    tf = library("transformers")
    config = tf.LlamaConfig(
        **SIZES | {"num_attention_heads": 4}, intermediate_size=24, num_key_value_heads=2, **SPECIAL
    )
    return tf.LlamaForCausalLM(config).eval(), {"input_ids": WORDS}


def opt():
    tf = library("transformers")
    config = tf.OPTConfig(
        **SIZES, ffn_dim=24, max_position_embeddings=32, word_embed_proj_dim=16, **SPECIAL
    )
    return tf.OPTForCausalLM(config).eval(), {"input_ids": WORDS}


def t5():
    tf = library("transformers")
    config = tf.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return tf.T5ForConditionalGeneration(config).eval(), {
        "input_ids": WORDS,
        "decoder_input_ids": WORDS[:, :5],
    }


def bert():
    tf = library("transformers")
    config = tf.BertConfig(**SIZES, intermediate_size=24, max_position_embeddings=32)
    return tf.BertForMaskedLM(config).eval(), {"input_ids": WORDS}


def vit():
    tf = library("transformers")
    sizes = {name: SIZES[name] for name in list(SIZES)[1:]}
    config = tf.ViTConfig(**sizes, image_size=32, patch_size=8, intermediate_size=24)
    return tf.ViTForImageClassification(config).eval(), {"pixel_values": IMAGES}


ENCODER_DECODER = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))
}


def whisper():
    tf = library("transformers")
    config = tf.WhisperConfig(
        vocab_size=64, d_model=16, num_mel_bins=8, max_source_positions=10, max_target_positions=12,
        decoder_start_token_id=3, pad_token_id=0, **ENCODER_DECODER, **SPECIAL,
    )  # fmt: skip
    inputs = {"input_features": IMAGES[:, 0, :8, :20], "decoder_input_ids": WORDS[:, :5]}
    return tf.WhisperForConditionalGeneration(config).eval(), inputs


def wav2vec2():
    tf = library("transformers")
    config = tf.Wav2Vec2Config(
        **SIZES, intermediate_size=24, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    return tf.Wav2Vec2ForCTC(config).eval(), {"input_values": IMAGES.flatten(1)[:, :400]}


def convnext():
    tf = library("transformers")
    config = tf.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2)
    return tf.ConvNextForImageClassification(config).eval(), {"pixel_values": IMAGES}


def mobilenet():
    tf = library("transformers")
    config = tf.MobileNetV2Config(image_size=32, depth_multiplier=0.25)
    return tf.MobileNetV2ForImageClassification(config), {"pixel_values": IMAGES}


def resnet():
    tf = library("transformers")
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
    return tf.ResNetForImageClassification(config), {"pixel_values": IMAGES}


def detr():
    tf = library("transformers")
    backbone = tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    config = tf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, d_model=16, num_queries=5,
        num_labels=4, **ENCODER_DECODER,
    )  # fmt: skip
    return tf.DetrForObjectDetection(config).eval(), {"pixel_values": IMAGES}


def transformer():
    model = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
    return model, (IMAGES[:, 0, :5, :16], IMAGES[:, 1, :4, :16])


def lora():
    """Adapters of three rank units each beside the frozen weights of a GPT-2."""
    peft, (model, inputs) = library("peft"), gpt2()
    config = peft.LoraConfig(
        r=3, target_modules=["c_attn", "c_fc"], init_lora_weights=False, fan_in_fan_out=True
    )
    return peft.get_peft_model(model, config).eval(), inputs


class Graph(nn.Module):
    """Two convolutions of a graph, whose edges are a buffer: values of inputs tell a trace nothing."""

    def __init__(self, convolution):
        super().__init__()
        self.first, self.second = convolution(3, 8), convolution(8, 2)
        self.edges = nn.Buffer(torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))

    def forward(self, x):
        return self.second(self.first(x, self.edges).relu(), self.edges)


NODES = torch.tensor([[1.0, -1, 2], [0, 1, 1], [2, 1, 0], [1, 1, -2]])


def graph(convolution="GCNConv", **options):
    layers = library("torch_geometric.nn")
    return Graph(lambda n, m: getattr(layers, convolution)(n, m, **options)), NODES


def isomorphism():
    """Its two sums weigh a node itself by a learned 1 + eps, which has the scale of the inputs and of the first sum."""

    def convolution(n, m):
        mlp = nn.Sequential(nn.Linear(n, 5), nn.ReLU(), nn.Linear(5, m))
        return library("torch_geometric.nn").GINConv(mlp, train_eps=True)

    return Graph(convolution), NODES


def clip():
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"} | GATE
    tf = library("transformers")
    config = tf.CLIPConfig(
        text_config={**SIZES, **PLACES, **SPECIAL}, vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=8,
    )  # fmt: skip
    return tf.CLIPModel(config).eval(), {"input_ids": WORDS, "pixel_values": IMAGES}


def swin():
    return build("Swin", {"pixel_values": IMAGES}, "ForImageClassification",
        image_size=32, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)  # fmt: skip


def segformer():
    return build("Segformer", {"pixel_values": IMAGES}, "ForSemanticSegmentation",
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2],
        decoder_hidden_size=8, strides=[4, 2], patch_sizes=[7, 3], mlp_ratios=[2, 2])  # fmt: skip


def deberta(version):
    return build(f"Deberta{version}", None, "ForMaskedLM", **SIZES, **PLACES, relative_attention=True,
        pos_att_type=["c2p", "p2c"])  # fmt: skip


def mamba(**cache):
    config = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return build("Mamba", None, **config, **cache)


def soft_actor():
    policies, spaces = library("stable_baselines3.sac.policies"), library("gymnasium").spaces
    boxes = spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,))
    return policies.SACPolicy(*boxes, lambda _: 1e-3, net_arch=[8, 8]).actor, STATES


def q_network():
    policies, spaces = library("stable_baselines3.dqn.policies"), library("gymnasium").spaces
    policy = policies.DQNPolicy(
        spaces.Box(-1, 1, (4,)), spaces.Discrete(3), lambda _: 1e-3, net_arch=[8, 8]
    )
    return policy.q_net, STATES


STATES = torch.tensor([[0.5, -1, 0.25, 1], [1, 0.5, -0.5, -1]])


def actor_critic():
    """Two towers of two ReLU layers; the actions that it draws, their values and their probabilities."""
    policies, spaces = library("stable_baselines3.common.policies"), library("gymnasium").spaces
    box, actions = spaces.Box(-1, 1, (4,)), spaces.Discrete(3)
    policy = policies.ActorCriticPolicy(
        box, actions, lambda _: 1e-3, activation_fn=nn.ReLU, net_arch=[8, 8]
    )
    return policy, STATES


MODELS = {
    # name: (builder, unit classes, operations at which the network is cut)
    "gpt2": (gpt2, 2 * (BLOCK + 2 * 16), {"scaled_dot_product_attention", "tanh"}),
    "llama": (llama, 2 * (8 + 4 + 2 * 16 + 24) + 16, {"scaled_dot_product_attention", "silu"}),
    "opt": (opt, 2 * (BLOCK + 2 * 16 + 24), {"scaled_dot_product_attention"}),
    "t5": (t5, 2 * (BLOCK + 2 * 16 + 24) + 2 * (2 * BLOCK + 3 * 16 + 24), {"scaled_dot_product_attention", "softmax"}),
    "bert": (bert, 2 * BLOCK + 16, {"scaled_dot_product_attention", "gelu"}),
    "vit": (vit, 2 * (BLOCK + 2 * 16) + 16, {"scaled_dot_product_attention", "gelu"}),
    "whisper": (whisper, 2 * (BLOCK + 2 * 16) + 2 * (2 * BLOCK + 3 * 16), {"scaled_dot_product_attention", "gelu"}),
    # and the four taps of its convolution of positions, whose weight has a gain for each
    "wav2vec2": (wav2vec2, 8 + 2 * BLOCK + 16 + 4, {"scaled_dot_product_attention", "gelu"}),
    "convnext": (convnext, 2 * 2 * (8 + 16) + 8 + 16, {"gelu"}),
    "mobilenet": (mobilenet, 3 * 8 + 16 + 24 + 40 + 80, {"hardtanh"}),
    "resnet": (resnet, 8 + 2 * 2 + 3 * (16 + 2 * 4), set()),
    "detr": (
        detr, 2 * (BLOCK + 24) + 2 * (2 * BLOCK + 24) + 32, {"scaled_dot_product_attention", "sigmoid"}
    ),
    "transformer": (transformer, 2 * (BLOCK + 24) + 16 + 2 * (2 * BLOCK + 24), {"scaled_dot_product_attention"}),
    "lora": (lora, 2 * (BLOCK + 2 * 16 + 2 * 3), {"scaled_dot_product_attention", "tanh"}),
    "graph": (graph, 8, set()),
    "actor-critic": (actor_critic, 4 * 8, {"logsumexp", "softmax"}),
    "gpt2, masked": (lambda: masked(gpt2), 2 * (BLOCK + 2 * 16), {"scaled_dot_product_attention", "tanh"}),
    "llama, masked": (lambda: masked(llama), 2 * (8 + 4 + 2 * 16 + 24) + 16, {"scaled_dot_product_attention", "silu"}),
    "opt, masked": (lambda: masked(opt), 2 * (BLOCK + 2 * 16 + 24), {"scaled_dot_product_attention"}),
    "t5, masked": (
        lambda: masked(t5), 2 * (BLOCK + 2 * 16 + 24) + 2 * (2 * BLOCK + 3 * 16 + 24),
        {"scaled_dot_product_attention", "softmax"},
    ),
    "bert, masked": (lambda: masked(bert), 2 * BLOCK + 16, {"scaled_dot_product_attention", "gelu"}),
    # two heads share the keys and values of one, turned by pairs; the gains of its norms are 1 + w,
    # which do not scale
    "gemma": (
        lambda: build("Gemma", **SIZES, **GATE, num_key_value_heads=1, head_dim=8, pad_token_id=0, **SPECIAL),
        2 * (8 + 4 + 24), {"scaled_dot_product_attention", "gelu"},
    ),
    "mistral": (
        lambda: build("Mistral", **SIZES, **GATE, num_key_value_heads=1, sliding_window=4, **SPECIAL),
        2 * (8 + 4 + 2 * 16 + 24) + 16, {"scaled_dot_product_attention", "silu"},
    ),
    "qwen2": (
        lambda: build("Qwen2", **SIZES, **GATE, num_key_value_heads=1),
        2 * (8 + 4 + 2 * 16 + 24) + 16, {"scaled_dot_product_attention", "silu"},
    ),
    # half of the dimensions of a head are turned; one norm for attention and MLP
    "phi": (lambda: build("Phi", **SIZES, **GATE), 2 * (16 + 12 + 16) + 16, {"scaled_dot_product_attention", "tanh"}),
    # a quarter of them
    "gpt-neox": (
        lambda: build("GPTNeoX", **SIZES, **PLACES), 2 * (16 + 14 + 2 * 16) + 16,
        {"scaled_dot_product_attention", "gelu"},
    ),
    "bloom": (lambda: build("Bloom", vocab_size=64, hidden_size=16, n_layer=2, n_head=2), 2 * (BLOCK + 2 * 16),
        {"softmax", "tanh"}),
    "roberta, masked": (
        lambda: masked(lambda: build("Roberta", None, "ForMaskedLM", **SIZES, **PLACES, pad_token_id=0, **SPECIAL)),
        2 * BLOCK + 16, {"scaled_dot_product_attention", "gelu"},
    ),
    "distilbert, masked": (
        lambda: masked(lambda: build("DistilBert", None, "ForMaskedLM", vocab_size=64, dim=16, n_layers=2, n_heads=2,
            hidden_dim=24, max_position_embeddings=32)), 2 * BLOCK + 16, {"scaled_dot_product_attention", "gelu"},
    ),
    "electra": (  # the gains of the norm of its narrow embedding, and of the last one
        lambda: build("Electra", None, "ForPreTraining", **SIZES, **PLACES, embedding_size=8), 2 * BLOCK + 8 + 16,
        {"scaled_dot_product_attention", "gelu"},
    ),
    # of a table of distances, which enters projections alone, the columns; the gains of the norm of
    # its head
    "deberta": (lambda: deberta(""), 2 * BLOCK + 2 * 16, {"softmax", "gelu"}),
    "deberta-v2": (lambda: deberta("V2"), 2 * BLOCK + 2 * 16, {"softmax", "gelu"}),
    # widths 8 and 16, and the norm in front of the merging of four patches
    "swin": (swin, 2 * (16 + 2 * 8) + 32 + 2 * (BLOCK + 2 * 16) + 16, {"softmax", "gelu"}),
    # the norm of the shortened keys; hidden units in front of a convolution by channels; norms at
    # the ends of stages
    "segformer": (
        segformer, (16 + 2 * 8 + 8 + 16 + 8) + (BLOCK + 2 * 16 + 32 + 16) + 2 * 8 + 8,
        {"scaled_dot_product_attention", "gelu"},
    ),
    # the gain of the norm in front of the projection of images; that of texts is returned, too
    "clip": (clip, 4 * (BLOCK + 2 * 16) + 16, {"scaled_dot_product_attention", "sigmoid", "matmul", "exp"}),
    # channels in front of a convolution, gains, the rank of the step size, and B and C of each state
    "mamba": (mamba, 2 * (32 + 16 + 1 + 5), {"exp", "silu", "softplus"}),
    "mamba without a cache": (
        lambda: mamba(use_cache=False), 2 * (32 + 16 + 1 + 5), {"exp", "silu", "softplus"}
    ),
    "graph attention": (lambda: graph("GATConv"), 8, {"exp"}),
    "graph attention of two": (lambda: graph("GATv2Conv", heads=1), 8, {"exp"}),
    "graph means": (lambda: graph("SAGEConv"), 8, set()),
    "graph maxima": (lambda: graph("SAGEConv", aggr="max"), 8, set()),
    "graph isomorphism": (isomorphism, 5 + 8 + 5, set()),
    "soft actor": (soft_actor, 2 * 8, {"tanh", "clamp"}),
    "q-network": (q_network, 2 * 8, set()),
}  # fmt: skip
QUICK = ("gpt2", "transformer")
EACH = pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)


def tensors(result):
    return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def made(name):
    """A small model with random weights, none of them zero, and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name][0]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model, inputs


def results(model, inputs):
    torch.manual_seed(1)  # dropout, and actions that are drawn
    with torch.no_grad():
        if isinstance(inputs, dict):
            return tensors(model(**inputs))
        return tensors(model(*inputs) if isinstance(inputs, tuple) else model(inputs))


@EACH
def test_powers_of_two_keep_what_a_model_returns(name):
    model, inputs = made(name)
    _, classes, cuts = MODELS[name]
    network = ps.trace(model, inputs)
    assert {cut.operation for cut in network.cuts if cut.counts} == cuts
    assert network.num_classes == classes
    before, weights = (
        results(model, inputs),
        {n: p.detach().clone() for n, p in model.named_parameters()},
    )
    generator = torch.Generator().manual_seed(0)
    ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True, generator=generator)
    assert any(not torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert all(map(torch.equal, before, results(model, inputs)))


@EACH
@pytest.mark.slow
def test_adamw_made_invariant_trains_both_members_alike(name):
    model, inputs = made(name)

    def loss(result):
        return sum(t.square().mean() for t in tensors(result) if t.requires_grad)

    def optimizer(copy, network):
        return ps.optim.Invariant(copy.parameters(), network, torch.optim.AdamW, lr=1e-3)

    report = ps.rescaling.check_invariance(
        model, inputs, loss, optimizer, steps=3, low=2.0**-6, high=2.0**6
    )
    assert report.passed, report


def bart():
    sides = {
        f"{side}_{key}": n
        for side in ("encoder", "decoder")
        for key, n in (("layers", 1), ("ffn_dim", 24))
    }
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    inputs = {"input_ids": WORDS, "decoder_input_ids": WORDS}
    return build(
        "Bart",
        inputs,
        "ForConditionalGeneration",
        vocab_size=64,
        d_model=16,
        pad_token_id=0,
        **sides,
        **heads,
    )


MORE = {
    "falcon": lambda: build("Falcon", **SIZES, **SPECIAL),
    "bart": bart,
    "xlnet": lambda: build(
        "XLNet", None, "LMHeadModel", vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=24
    ),
    "albert": lambda: masked(
        lambda: build("Albert", None, "ForMaskedLM", **SIZES, **GATE, embedding_size=8)
    ),
    "olmo2": lambda: build("Olmo2", **SIZES, **GATE, **SPECIAL),
    "longformer": lambda: build(
        "Longformer", None, "ForMaskedLM", **SIZES, **PLACES, attention_window=4
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_models_keep_what_they_return(name):
    torch.manual_seed(0)
    model, inputs = MORE[name]()
    network, before = ps.trace(model, inputs), results(model, inputs)
    assert network.num_classes
    generator = torch.Generator().manual_seed(0)
    ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True, generator=generator)
    assert all(map(torch.equal, before, results(model, inputs)))


@pytest.mark.slow
def test_experts_may_stay_outside():
    """Tokens are sorted by their experts, which mixes the examples; the rest of the model goes on."""
    model, inputs = build(
        "Mixtral", **SIZES, **GATE, num_key_value_heads=1, num_local_experts=4, **SPECIAL
    )
    network = ps.trace(model, inputs, outside=["*.experts"])
    # a norm before attention; the other one is read by experts
    assert network.num_classes == 2 * (8 + 4 + 16) + 16
    before = results(model, inputs)
    ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True)
    assert all(map(torch.equal, before, results(model, inputs)))


@pytest.mark.slow
def test_on_data_a_mask_is_followed():
    model, inputs = made("bert, masked")
    network = ps.trace(model, inputs)
    metric = ps.paths.data_dependent_kappa(network, inputs, alpha=0.5, statistic="second_moment")
    assert metric.keys() == network.parameters.keys()
    assert all(bool(t.isfinite().all()) for t in metric.values())
    nothing = inputs | {"attention_mask": torch.ones_like(MASK)}
    other = ps.paths.data_dependent_kappa(network, nothing, alpha=0.5, statistic="second_moment")
    alone = {key: t for key, t in inputs.items() if key != "attention_mask"}
    plain = ps.paths.data_dependent_kappa(
        ps.trace(model, alone), alone, alpha=0.5, statistic="second_moment"
    )
    for key, value in plain.items():
        torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-6)
        assert key not in ("bert.encoder.layer.0.attention.self.value.weight",) or not torch.equal(
            metric[key], value
        )
