"""`python -m cartridge_loadtest`: a load test without the gateway's command line.

Owns nothing and refuses nothing: see `commands`.
"""

import sys

from cartridge_loadtest.commands import main

sys.exit(main())
