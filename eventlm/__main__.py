"""`python -m eventlm`, the same as the program `eventlm`."""

from __future__ import annotations

import sys

from eventlm.cli.main import main

sys.exit(main())
