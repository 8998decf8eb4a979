#pragma once

#include <string>

#include "error.h"
#include "os/file.h"

namespace torch_ckpt::os {

// Opens files beneath a directory by untrusted names.
//
// 1. A name is refused unless it has the form of a file name beneath a directory (file_name.h).
// 2. The kernel opens the name relative to the descriptor and follows no link in any component
//    (openat2). If openat2 is missing (old kernels, sandboxes), the components are opened one by one.
// 3. The opened file must be a regular file. This is checked through its descriptor, not its path.
//
// So another process cannot redirect the open by replacing files or directories meanwhile.

/// Opens an existing regular file beneath `directory_fd` for reading. `directory_path` is used only
/// in messages. Fails with Errc::outside_directory if the name leads out of the directory or
/// contains a link, and with Errc::invalid_argument for a FIFO, a device or a directory.
Result<File> open_beneath(int directory_fd, const std::string& directory_path,
                          const std::string& name, IoMode mode = IoMode::buffered);

}  // namespace torch_ckpt::os
