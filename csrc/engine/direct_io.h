#pragma once

namespace torch_ckpt::engine {

/// Around the page cache: where it helps and is offered, always (or an error), never.
enum class DirectIo { automatic, on, off };

}  // namespace torch_ckpt::engine
