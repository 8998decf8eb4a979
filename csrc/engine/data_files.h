#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/direct_io.h"
#include "engine/record_reader.h"
#include "error.h"
#include "os/directory.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

// The data files of a session that reads: each is opened beneath the directory by the first of its
// units and closed after the last, so that a checkpoint of many files never has more than a few of
// them open. acquire() and release() may be called by several threads at once.
class DataFiles {
 public:
  DataFiles(os::Directory directory, std::vector<std::string> names, DirectIo direct_io)
      : directory_(std::move(directory)),
        names_(std::move(names)),
        direct_io_(direct_io),
        files_(names_.size()) {}

  std::string path(std::size_t file) const { return directory_.path_of(names_[file]); }

  /// Before the first acquire(), once for each unit that will release().
  void expect_unit(std::size_t file) { ++files_[file].units_left; }

  Result<std::shared_ptr<DataFile>> acquire(std::size_t file);
  /// After the last unit: threads may hold on to the session a little longer, but not to this.
  void close_directory() { directory_.close(); }
  /// After a unit, which no longer holds what it acquired.
  void release(std::size_t file);

 private:
  struct State {
    os::Mutex mutex;
    std::shared_ptr<DataFile> file TC_GUARDED_BY(mutex);
    std::atomic<std::size_t> units_left{0};
  };

  os::Directory directory_;
  const std::vector<std::string> names_;
  const DirectIo direct_io_;
  std::vector<State> files_;
};

}  // namespace torch_ckpt::engine
