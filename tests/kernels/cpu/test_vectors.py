"""Functions of vectors in the compiled forward pass against those of the C++ library in double precision."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from eventlm.kernels.cpu.native import processor_flags

FOLDER = Path(__file__).parents[3] / "kernels/cpu"
#: By instructions, what the compiler needs for them.
FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512bw": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
}

#: Prints the largest difference of each function relative to its value, but at least to `least`; and whether all let a
#: NaN through.
PROGRAM = """
#include <cmath>
#include <cstdio>

#include "vec.h"

using namespace eventlm;

template <class Found, class Wanted>
void compare(const char* name, double least, Found&& found, Wanted&& wanted) {
  double most = 0;
  for (int i = -4000000; i < 4000000; i += 7) {
    const float x = i * 1e-5f;
    const double want = wanted(static_cast<double>(x));
    most = std::fmax(most, std::abs(found(splat(x))[i & 15] - want) / std::fmax(std::abs(want), least));
  }
  const f32x16 spoilt = found(splat(NAN));
  std::printf("%s %g %d\\n", name, most, std::isnan(spoilt[0]) && std::isnan(spoilt[15]));
}

int main() {
  auto phi = [](double x) { return 0.5 * std::erfc(-x * std::sqrt(0.5)); };
  auto inner = [](double x) { return std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); };
  compare("silu", 1e-6, silu, [](double x) { return x / (1 + std::exp(-x)); });
  compare("gelu", 0.1, gelu, [&](double x) { return x * phi(x); });
  compare("gelu_tanh", 1e-6, gelu_tanh, [&](double x) { return x / (1 + std::exp(-2 * inner(x))); });
  compare("capped", 5, [](f32x16 x) { return capped(x, 5); }, [](double x) { return 5 * std::tanh(x / 5); });
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("needed", FLAGS)
def test_functions(tmp_path: Path, needed: str) -> None:
    if needed != "baseline" and needed not in processor_flags():
        pytest.skip("not this processor's")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    flags = ["-std=c++20", "-O2", "-ffp-contract=fast", "-Wno-psabi", f"-I{FOLDER}", *FLAGS[needed]]
    subprocess.run(["g++", *flags, tmp_path / "main.cpp", "-o", tmp_path / "program"], check=True)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _, _ in rows] == ["silu", "gelu", "gelu_tanh", "capped"]
    for name, error, lets_nan_through in rows:
        assert float(error) < 4e-6, (name, error)
        assert lets_nan_through == "1", name
