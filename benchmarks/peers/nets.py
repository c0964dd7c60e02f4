"""The cases' networks in plain jax, on torch's weights: images are NHWC, and weights multiply from the right."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Parameters = dict[str, jax.Array]
Network = Callable[[Parameters, jax.Array], jax.Array]
State = dict[str, np.ndarray]


def build(case: str, state: State, x: np.ndarray) -> tuple[Network, Parameters, np.ndarray]:
    """The network, its parameters and its inputs, from torch's state dict and inputs."""
    statistics = {k: jnp.asarray(v) for k, v in state.items() if "running" in k}
    weights = {k: v for k, v in state.items() if "running" not in k and "num_batches" not in k}
    if case == "lenet5":
        weights["7.weight"] = weights["7.weight"].reshape(-1, 16, 5, 5).transpose(0, 2, 3, 1).reshape(-1, 400)
    parameters = {k: jnp.asarray(convert(v)) for k, v in weights.items()}
    if x.ndim == 4:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    networks: dict[str, Network] = {
        "mlp": mlp,
        "lenet5": lenet5,
        "resnet18": lambda p, x: resnet18(p, statistics, x),
        "transformer": transformer,
    }
    return networks[case], parameters, x


def convert(weight: np.ndarray) -> np.ndarray:
    axes = {2: (1, 0), 4: (2, 3, 1, 0)}.get(weight.ndim)
    return weight if axes is None else np.ascontiguousarray(weight.transpose(axes))


def linear(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    return x @ p[name + ".weight"] + p[name + ".bias"]


def conv(w: jax.Array, x: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    pads = ((padding, padding), (padding, padding))
    return lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def max_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mlp(p: Parameters, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(linear(p, "0", x))
    x = jax.nn.relu(linear(p, "2", x))
    return linear(p, "4", x)


def lenet5(p: Parameters, x: jax.Array) -> jax.Array:
    for name in ("0", "3"):
        x = max_pool(jax.nn.relu(conv(p[name + ".weight"], x) + p[name + ".bias"]))
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(linear(p, "7", x))
    x = jax.nn.relu(linear(p, "9", x))
    return linear(p, "11", x)


def conv_norm(p: Parameters, statistics: Parameters, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    w = p[name + ".0.weight"]
    x = conv(w, x, stride, padding=w.shape[0] // 2)
    mean, variance = statistics[name + ".1.running_mean"], statistics[name + ".1.running_var"]
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p[name + ".1.weight"] + p[name + ".1.bias"]


def resnet18(p: Parameters, statistics: Parameters, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(conv_norm(p, statistics, "stem", x))
    for i in range(8):
        name, stride = f"blocks.{i}.", 2 if i in (2, 4, 6) else 1
        y = jax.nn.relu(conv_norm(p, statistics, name + "first", x, stride))
        y = conv_norm(p, statistics, name + "second", y)
        shortcut = conv_norm(p, statistics, name + "shortcut", x, stride) if stride == 2 else x
        x = jax.nn.relu(y + shortcut)
    return linear(p, "head", x.mean((1, 2)))


def layer_norm(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    scale = lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * scale * p[name + ".weight"] + p[name + ".bias"]


def attention(p: Parameters, name: str, x: jax.Array, heads: int = 4) -> jax.Array:
    n, length, width = x.shape
    qkv = x @ p[name + ".in_proj_weight"] + p[name + ".in_proj_bias"]
    q, k, v = (part.reshape(n, length, heads, -1) for part in jnp.split(qkv, 3, axis=-1))
    weights = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", q, k) / (width // heads) ** 0.5)
    mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(n, length, width)
    return linear(p, name + ".out_proj", mixed)


def transformer(p: Parameters, x: jax.Array) -> jax.Array:
    x = linear(p, "embedding", x)
    for i in range(2):
        name = f"encoder.layers.{i}."
        x = layer_norm(p, name + "norm1", x + attention(p, name + "self_attn", x))
        y = linear(p, name + "linear2", jax.nn.relu(linear(p, name + "linear1", x)))
        x = layer_norm(p, name + "norm2", x + y)
    return linear(p, "head", x.mean(1))
