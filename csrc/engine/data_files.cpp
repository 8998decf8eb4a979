#include "engine/data_files.h"

namespace torch_ckpt::engine {

Result<std::shared_ptr<DataFile>> DataFiles::acquire(std::size_t number) {
  State& state = files_[number];
  const os::MutexLock lock(state.mutex);
  if (state.file == nullptr) {
    auto opened = DataFile::open(folder_, names_[number], direct_io_);
    if (!opened) return opened.error();
    state.file = std::make_shared<DataFile>(std::move(*opened));
  }
  return state.file;
}

void DataFiles::release(std::size_t number) {
  State& state = files_[number];
  if (--state.units_left > 0) return;
  const os::MutexLock lock(state.mutex);
  state.file.reset();
}

}  // namespace torch_ckpt::engine
