"""What every gRPC server of ours has: admission, guard, requests, metrics."""
