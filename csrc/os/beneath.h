#pragma once

#include <string>
#include <string_view>

#include "error.h"
#include "os/file.h"

namespace torch_ckpt::os {

// Opens files beneath a directory, by untrusted names.
//
// 1. A name is refused if its text cannot name a file beneath the directory: if it is empty or
//    absolute, contains a NUL, a backslash or a component "..", or names no file.
// 2. The kernel opens the name relative to the descriptor and follows no link in any component
//    (openat2). Without openat2 (old kernels, sandboxes) the components are opened one by one.
// 3. The type of the opened file is checked by its descriptor, never by its path: it must be a
//    regular file.
//
// So another process that replaces files or directories meanwhile cannot redirect the open.

/// Returns false if the text of `name` shows that it cannot name a file beneath a directory.
bool names_file_beneath(std::string_view name);

/// Opens an existing regular file for reading beneath `directory_fd`. `directory_path` is for
/// messages. Fails with Errc::outside_directory if the name or a link leads out of the directory,
/// and with Errc::invalid_argument for a FIFO, a device or a directory.
Result<File> open_beneath(int directory_fd, const std::string& directory_path,
                          const std::string& name, IoMode mode = IoMode::buffered);

}  // namespace torch_ckpt::os
