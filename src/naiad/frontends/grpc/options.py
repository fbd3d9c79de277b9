"""What the gRPC front end can be told. Pure."""

from typing import Literal

import msgspec

from naiad.frontends.grpc.connection import Limits
from naiad.options import Restriction, ServerOptions


class GrpcOptions(msgspec.Struct, frozen=True):
    """The options of the front end; defaults are Triton's. Port 0 lets the system choose, None is no limit.

    `forward` is the regular expression of the metadata that become request parameters, `drain_s` how long running
    calls may take to finish when the front end stops.
    """

    address: str = "0.0.0.0"
    port: int = 8001
    reuse_port: bool = False
    restrictions: tuple[Restriction, ...] = ()
    forward: str = ""
    use_ssl: bool = False
    use_ssl_mutual: bool = False
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""
    compression_level: Literal["none", "low", "medium", "high"] = "none"
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age_ms: int | None = None
    max_connection_age_grace_ms: int | None = None
    reflection: bool = False
    drain_s: float = 30.0

    @property
    def is_secure(self) -> bool:
        return self.use_ssl or self.use_ssl_mutual

    @property
    def limits(self) -> Limits:
        """What they say about connections."""
        age_ms, grace_ms = self.max_connection_age_ms, self.max_connection_age_grace_ms
        return Limits(
            self.keepalive_time_ms / 1e3,
            self.keepalive_timeout_ms / 1e3,
            self.keepalive_permit_without_calls,
            self.http2_max_pings_without_data,
            self.http2_min_recv_ping_interval_ms / 1e3,
            self.http2_max_ping_strikes,
            None if age_ms is None else age_ms / 1e3,
            None if grace_ms is None else grace_ms / 1e3,
        )

    @classmethod
    def of(cls, server: ServerOptions) -> "GrpcOptions":
        """The front end's part of the server's options."""
        return cls(
            address=server.grpc_address,
            port=server.grpc_port,
            reuse_port=server.reuse_grpc_port,
            restrictions=server.grpc_restricted_protocol,
            forward=server.grpc_header_forward_pattern,
            use_ssl=server.grpc_use_ssl,
            use_ssl_mutual=server.grpc_use_ssl_mutual,
            server_cert=server.grpc_server_cert,
            server_key=server.grpc_server_key,
            root_cert=server.grpc_root_cert,
            compression_level=server.grpc_infer_response_compression_level,
            reflection=server.grpc_reflection,
            keepalive_time_ms=server.grpc_keepalive_time,
            keepalive_timeout_ms=server.grpc_keepalive_timeout,
            keepalive_permit_without_calls=server.grpc_keepalive_permit_without_calls,
            http2_max_pings_without_data=server.grpc_http2_max_pings_without_data,
            http2_min_recv_ping_interval_ms=server.grpc_http2_min_recv_ping_interval_without_data,
            http2_max_ping_strikes=server.grpc_http2_max_ping_strikes,
            max_connection_age_ms=server.grpc_max_connection_age,
            max_connection_age_grace_ms=server.grpc_max_connection_age_grace,
            drain_s=float(server.exit_timeout_secs),
        )
