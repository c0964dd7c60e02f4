"""torch_geometric: layers on a graph that the module holds; samples are numbers of nodes, or whole small graphs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn

from benchmarks.robustness.adversary.entry import CLASSES, Entry, entry, family

NODES = 12


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges (a ring and some chords, both ways) and weights of the edges."""
    generator = torch.Generator().manual_seed(0)
    ring = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    chords = torch.randint(0, NODES, (2, 8), generator=generator)
    edges = torch.cat([ring, ring.flip(0), chords, chords.flip(0)], 1)
    return torch.randn(NODES, 6, generator=generator), edges, torch.rand(edges.shape[1], generator=generator)


class OnGraph(nn.Module):
    """Two layers over the whole graph; the rows of the nodes that are asked for."""

    def __init__(self, layer: Any, weighted: bool = False, width: int = 8, heads: int = 1) -> None:
        super().__init__()
        x, edges, weights = graph()
        self.register_buffer("x", x)
        self.register_buffer("edges", edges)
        self.register_buffer("weights", weights)
        self.first, self.second = layer(6, width), layer(width * heads, width)
        self.head, self.weighted = nn.Linear(width * heads, CLASSES), weighted

    def forward(self, nodes: Tensor) -> Tensor:
        more = (self.weights,) if self.weighted else ()
        h = self.first(self.x, self.edges, *more).relu()
        return self.head(self.second(h, self.edges, *more).relu())[nodes]


class PerSample(nn.Module):
    """Features of every node for each sample, on one graph: the batch is a leading dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", graph()[1])
        self.first, self.second = gnn.GCNConv(6, 8, node_dim=-2), gnn.GraphConv(8, CLASSES, node_dim=-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, self.edges).relu(), self.edges).mean(1)


class Disjoint(nn.Module):
    """Samples become one graph without edges between them, as a loader of graphs makes it."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", graph()[1])
        self.first, self.second, self.head = gnn.SAGEConv(6, 8), gnn.GATConv(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        edges = torch.cat([self.edges + i * NODES for i in range(n)], 1)
        number = torch.arange(n).repeat_interleave(NODES)
        h = self.second(self.first(x.flatten(0, 1), edges).relu(), edges).relu()
        return self.head(gnn.global_mean_pool(h, number, n))


def mlp(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))


def nodes(n: int) -> Tensor:
    return torch.randperm(NODES)[:n] if n <= NODES else torch.randint(0, NODES, (n,))


LAYERS: dict[str, Any] = {
    "gcn": gnn.GCNConv,
    "sage": gnn.SAGEConv,
    "sage_max": partial(gnn.SAGEConv, aggr="max", normalize=True),
    "gin": lambda a, b: gnn.GINConv(mlp(a, b), train_eps=True),
    "gat": gnn.GATConv,
    "gatv2": partial(gnn.GATv2Conv, share_weights=False),
    "transformer": partial(gnn.TransformerConv, beta=True),
    "cheb": partial(gnn.ChebConv, K=3),
    "tag": partial(gnn.TAGConv, K=2),
    "sgc": partial(gnn.SGConv, K=2),
    "arma": partial(gnn.ARMAConv, num_stacks=2, num_layers=2, shared_weights=True),
    "gated": lambda _, b: gnn.GatedGraphConv(b, 2),
    "edge": lambda a, b: gnn.EdgeConv(mlp(2 * a, b)),
}
ENTRIES: list[Entry] = family(
    "graphs",
    [entry(f"graph_{name}", partial(OnGraph, layer), nodes) for name, layer in LAYERS.items()]
    + [
        entry("graph_gcn_weighted", partial(OnGraph, gnn.GCNConv, weighted=True), nodes),
        entry("graph_gat_heads", partial(OnGraph, partial(gnn.GATConv, heads=2), heads=2), nodes),
        entry("graph_per_sample", PerSample, lambda n: torch.randn(n, NODES, 6)),
        entry("graph_disjoint", Disjoint, lambda n: torch.randn(n, NODES, 6)),
    ],
)
