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

// A directory held open, by which a session opens files. Owns the descriptor.
// Safe for concurrent use by multiple threads.
class Directory {
 public:
  /// Links on the way to it are followed: the caller chose the path.
  static Result<Directory> open(const std::string& path);
  /// The one that `fd` stands for, by a descriptor of its own; `path` is for messages.
  static Result<Directory> duplicate(int fd, std::string path);

  Directory(Directory&& other) noexcept;
  Directory& operator=(Directory&& other) noexcept;
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory();

  /// Nothing can be opened any more.
  void close();

  const std::string& path() const { return path_; }
  /// Of a file beneath it, for messages.
  std::string path_of(const std::string& name) const { return path_ + "/" + name; }

  Result<File> open_for_read(const std::string& name, IoMode mode = IoMode::buffered) const {
    return open_beneath(fd_, path_, name, mode);
  }

 private:
  Directory(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  int fd_ = -1;
  std::string path_;
};

}  // namespace torch_ckpt::os
