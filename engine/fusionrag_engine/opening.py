"""Opening the library of one namespace: which tiers a configuration has, and where its catalog lies."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch

from .catalog import Catalog
from .config import EngineConfig
from .errors import ConfigError
from .keys import CacheKeys, digest
from .library import ChunkLibrary
from .locks import FileLocks
from .store import ChunkStore, DiskTier, DurableTier, RemoteTier


def open_library(keys: CacheKeys, config: EngineConfig, device: torch.device | None = None) -> ChunkLibrary:
    """The library of `keys.namespace` in the tiers that `config` names.

    Raises:
        ConfigError: a URL whose kind is not known, or a remote tier without a local one in front of it.
    """
    home = catalog_directory(config)
    home = None if home is None else home / keys.namespace
    root = local_directory(config.cache_dir)
    disk = None if root is None else DiskTier(root / keys.namespace / "caches")
    remote = None
    if config.cache_dir is not None and root is None:
        remote = open_remote(str(config.cache_dir), keys.namespace, "cache_dir")
    if config.remote_dir is not None:
        if disk is None:
            raise ConfigError(
                f"remote_dir={config.remote_dir!r} needs a local cache_dir in front of it; cache_dir is "
                f"{config.cache_dir!r}"
            )
        remote = open_remote(str(config.remote_dir), keys.namespace, "remote_dir")
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
    catalog = Catalog(None if home is None else home / "catalog.sqlite")
    store = ChunkStore(
        catalog,
        config.host_bytes,
        disk=disk,
        disk_bytes=config.disk_bytes,
        remote=remote,
        remote_bytes=config.remote_bytes,
        device=device,
        device_bytes=config.device_bytes,
    )
    locks = FileLocks(None if home is None else home / "locks")
    return ChunkLibrary(keys, catalog, store, locks, codec=config.codec, scope_sharing=config.scope_sharing)


def open_remote(url: str, namespace: str, setting: str) -> DurableTier:
    directory = local_directory(url, setting)
    if directory is not None:
        return DiskTier(directory / namespace / "caches", name="remote")
    return RemoteTier(f"{url.rstrip('/')}/{namespace}/caches")


def local_directory(place: str | Path | None, setting: str = "cache_dir") -> Path | None:
    """The local directory a path or `file://` URL names; None for another URL.

    Raises:
        ConfigError: a URL of a kind that fsspec does not know.
    """
    if place is None:
        return None
    text = str(place)
    if "://" not in text:
        return Path(text).expanduser()
    url = urlparse(text)
    if url.scheme == "file":
        return Path(url2pathname(url.path))
    from fsspec import available_protocols

    if url.scheme not in available_protocols():
        raise ConfigError(
            f"{setting}={text!r} is not accepted; give a local directory, or a URL of a kind that fsspec knows"
        )
    return None


def catalog_directory(config: EngineConfig) -> Path | None:
    """Where the catalog and its locks lie: in a local `cache_dir`, or in a local directory of their own for a URL."""
    if config.cache_dir is None:
        return None
    directory = local_directory(config.cache_dir)
    if directory is not None:
        return directory
    if config.catalog_dir is not None:
        return Path(config.catalog_dir).expanduser()
    return Path.home() / ".cache" / "fusionrag" / digest(url=str(config.cache_dir).rstrip("/"))[:16]


def namespaces(directory: Path) -> list[str]:
    """Namespaces that have a catalog below a directory."""
    return sorted(path.parent.name for path in directory.glob("*/catalog.sqlite"))
