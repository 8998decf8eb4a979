#include "os/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>

#include "os/fault.h"
#include "os/process.h"
#include "os/uninterrupted.h"

namespace torch_ckpt::os {
namespace {

constexpr const char* kName = "torch_ckpt shared memory";

// Returns an empty text if the system does not identify the machine.
std::string own_machine() {
  const ProcessSpace space = own_process_space();
  if (space.boot.empty()) return {};
  return space.boot + " " + space.pids + " " + std::to_string(::geteuid());
}

}  // namespace

Result<File> open_memory_file(const std::string& path, const FileIdentity& identity) {
  TC_FAULT("open", path);
  // O_NONBLOCK and O_NOCTTY, because the path may lead to another kind of file by now.
  const int fd = uninterrupted(
      [&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); });
  if (fd < 0) return system_error(errno, "open", path);
  auto file = File::adopt(fd, path, false);
  if (!file) return file.error();
  auto found = file->identity();
  if (!found) return found.error();
  if (*found != identity) return system_error(ENOENT, "open", path);
  return file;
}

Result<MemoryFile> MemoryFile::create() {
  TC_FAULT("memfd_create", kName);
  // Others cannot open the descriptors of a process that must not be traced.
  if (::prctl(PR_GET_DUMPABLE) != 1) return system_error(EACCES, "prctl", kName);
  Address address;
  address.machine = own_machine();
  if (address.machine.empty()) return system_error(ENOENT, "open", "/proc");
  MemoryFile created(::memfd_create(kName, MFD_CLOEXEC));
  if (created.descriptor_ < 0) return system_error(errno, "memfd_create", kName);
  address.process = ::getpid();
  address.descriptor = created.descriptor_;
  auto identity = identity_at(created.descriptor_, "", AT_EMPTY_PATH, kName);
  if (!identity) return identity.error();
  address.file = *identity;
  created.address_ = std::move(address);
  return created;
}

MemoryFile::~MemoryFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Result<SharedMemory> SharedMemory::map(const MemoryFile::Address& address, std::size_t bytes) {
  const std::string path =
      "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.descriptor);
  auto file = open_memory_file(path, address.file);
  if (!file) return file.error();
  // Without allocated memory, a write to the mapping could raise SIGBUS.
  TC_TRY(file->reserve(bytes));
  TC_FAULT("mmap", path);
  const int fd = std::move(*file).release();
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int failed = mapped == MAP_FAILED ? errno : 0;
  ::close(fd);
  if (failed != 0) return system_error(failed, "mmap", path);
  return SharedMemory({static_cast<std::byte*>(mapped), bytes});
}

SharedMemory::~SharedMemory() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace torch_ckpt::os
