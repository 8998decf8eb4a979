#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/direct_io.h"
#include "engine/record_reader.h"
#include "engine/store.h"
#include "error.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

// The data files that a session reads. Each file is opened for its first read unit and closed after
// its last, so only a few files of a large checkpoint are open at a time. acquire() and release()
// may be called concurrently.
class DataFiles {
 public:
  DataFiles(Folder folder, std::vector<std::string> names, DirectIo direct_io)
      : folder_(std::move(folder)),
        names_(std::move(names)),
        direct_io_(direct_io),
        files_(names_.size()) {}

  bool are_in_store() const { return folder_.store() != nullptr; }
  std::string path(std::size_t file) const { return folder_.path_of(names_[file]); }

  /// Registers a unit, which must call release() when it is done. Register all units before the
  /// first acquire().
  void expect_unit(std::size_t file) { ++files_[file].units_left; }

  /// Returns the file, opening it if necessary.
  Result<std::shared_ptr<DataFile>> acquire(std::size_t file);
  /// Marks a unit as done. The caller must first drop the file that it acquired.
  void release(std::size_t file);
  /// Closes the folder. Call this after the last unit: threads may keep the session alive a little
  /// longer, but should not keep the directory open.
  void close_folder() { folder_.close(); }

 private:
  struct State {
    os::Mutex mutex;
    std::shared_ptr<DataFile> file TC_GUARDED_BY(mutex);
    std::atomic<std::size_t> units_left{0};
  };

  Folder folder_;
  const std::vector<std::string> names_;
  const DirectIo direct_io_;
  std::vector<State> files_;
};

}  // namespace torch_ckpt::engine
