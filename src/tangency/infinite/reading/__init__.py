"""From an nn.Module to layers of infinite width."""
