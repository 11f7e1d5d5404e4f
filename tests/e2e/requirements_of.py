"""Print what a wheel needs, without its extras and the torch companions that have no CPU build."""

import email
import re
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for need in email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist") or []:
    if "extra ==" not in need and not re.match(r"torch(vision|audio|codec)?\b", need):
        print(need)
