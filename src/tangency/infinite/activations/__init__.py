"""Gaussian moments of activations: E[φ(u)φ(v)] and E[φ'(u)φ'(v)].

- `dual.py`: what a dual is, and those with a kink or a jump at 0; `duals.py`: all others in closed form;
- `quadrature.py`: the dual of any function, by whatever is fastest and good enough: an expansion, `kink_table.py`,
  `piecewise.py` or `rules.py`;
- `recognize.py`: which activation of torch has which dual.
"""
