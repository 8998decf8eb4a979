#pragma once

#include <string>
#include <string_view>

#include "error.h"
#include "os/file.h"

namespace torch_ckpt::os {

// Opening files beneath a directory, by names that may come from anybody.
//
// 1. A name is refused by its text where it could not be that of a file beneath the directory:
//    empty, absolute, with a NUL, a backslash or a component "..", or naming no file.
// 2. The kernel opens it beneath the descriptor and follows no link at all, not of directories on
//    the way either (openat2). Where that is not to be had, old kernels and sandboxes, the
//    components are opened one by one.
// 3. What was opened is looked at by its descriptor, never by its path: only a regular file is one.
//
// So nothing that is exchanged meanwhile leads elsewhere.

/// Whether `name` may be the name of a file beneath a directory, as far as its text can tell.
bool names_file_beneath(std::string_view name);

/// Opens an existing regular file for reading beneath `directory_fd`. `directory_path` is for
/// messages. Errc::outside_directory where the name, or a link, leads elsewhere;
/// Errc::invalid_argument where it is a FIFO, a device or a directory.
Result<File> open_beneath(int directory_fd, const std::string& directory_path,
                          const std::string& name, IoMode mode = IoMode::buffered);

}  // namespace torch_ckpt::os
