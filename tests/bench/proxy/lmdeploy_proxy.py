"""Start LMDeploy's own proxy without installing all of LMDeploy.

`lmdeploy/__init__.py` imports the whole engine.  The proxy needs little of it, so the
package is entered by its path and its `__init__` is not run; the proxy module itself
runs unchanged.  `LMDEPLOY_SOURCE` is the unpacked wheel; `LMDEPLOY_SITE` a folder with
packages that are missing here (torch), used last.
"""

import argparse
import os
import sys
import types

sys.dont_write_bytecode = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    source = os.environ["LMDEPLOY_SOURCE"]
    if site := os.environ.get("LMDEPLOY_SITE"):
        sys.path.append(site)
    for name in ("lmdeploy", "lmdeploy.pytorch", "lmdeploy.serve", "lmdeploy.serve.core"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(source, *name.split("."))]
        sys.modules[name] = package
    from lmdeploy.serve.proxy.proxy import proxy

    proxy(server_name=args.host, server_port=args.port, log_level="WARNING", disable_cache_status=True)


if __name__ == "__main__":
    main()
