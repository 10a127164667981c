"""No package has circles among its modules, those of `TYPE_CHECKING` included."""

from __future__ import annotations

import grimp


def test_no_package_has_circles() -> None:
    graph = grimp.build_graph("eventlm", "eventlm.kernels", cache_dir=None)
    packages = sorted(module for module in graph.modules if graph.find_children(module))
    assert len(packages) > 40
    circles = {package: graph.nominate_cycle_breakers(package) for package in packages}
    assert {package: sorted(breakers) for package, breakers in circles.items() if breakers} == {}
