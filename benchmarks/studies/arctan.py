"""The coefficients of src/tangency/infinite/moments/fused/arctan.py, and how far off they are.

    .venv/bin/python -m benchmarks.studies.arctan

P(z) = atan(√z)/√z on [0, 1] by interpolation at Chebyshev's points, solved in 50 digits (mpmath comes with torch). The
nearest singularity is z = −1, so each degree gains a factor of 3 + √8.
"""

import mpmath
from mpmath import mpf

from tangency.infinite.moments.fused import arctan

DEGREES = {"DOUBLE": 19, "SINGLE": 10}


def wanted(z: mpf) -> mpf:
    return mpmath.atan(mpmath.sqrt(z)) / mpmath.sqrt(z) if z else mpf(1)


def fitted(degree: int) -> list[mpf]:
    """Coefficients, that of 1 first."""
    n = degree + 1
    points = [(1 + mpmath.cos(mpmath.pi * (2 * k + 1) / (2 * n))) / 2 for k in range(n)]
    matrix = mpmath.matrix([[z**j for j in range(n)] for z in points])
    return list(mpmath.lu_solve(matrix, mpmath.matrix([wanted(z) for z in points])))


def main() -> None:
    mpmath.mp.dps = 50
    for name, degree in DEGREES.items():
        exact = fitted(degree)
        print(f"{name} = (\n" + "".join(f"    {float(c)!r},\n" for c in exact) + ")")
        for label, used in (("exact", exact), ("as it stands", [mpf(c) for c in getattr(arctan, name, ())])):
            grid = [mpf(k) / 2000 for k in range(2001)]
            print(f"# {label}: {mpmath.nstr(max(abs(mpmath.polyval(used[::-1], z) - wanted(z)) for z in grid), 3)}")


if __name__ == "__main__":
    main()
