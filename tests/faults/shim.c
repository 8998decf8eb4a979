// Library that is preloaded between a program and libc. It logs the calls on one directory tree. It
// can fail a call, make it return early, kill the process before it, or change the target of a path
// just before it.
//
// 1. A call is on the tree if its path argument or its descriptor refers to a file in the tree.
//    Descriptors are looked up in /proc/self/fd, so they need not be tracked.
// 2. Calls of the kinds in `mask` are numbered over all threads. The order applies to the call with
//    number `first` and to the next `times - 1`.
// 3. The file in SHIM_BLOCK contains the order and the log. The tests map it, too, and read the log
//    of a child that was killed.
//
// Calls within libc (by fopen, the open of opendir) are not intercepted; Python and the engine make
// their calls directly.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

// The order is that of KINDS in tests/interposed.py.
enum kind {
  OPEN,
  READ,
  WRITE,
  FSYNC,
  SYNC_RANGE,
  SYNCFS,
  FALLOCATE,
  FTRUNCATE,
  RENAME,
  LINK,
  UNLINK,
  RMDIR,
  MKDIR,
  CLOSE,
  FLOCK,
  STAT,
  OPENDIR,
  DUP,
  KIND_COUNT
};

// The order is that of ACTIONS in tests/interposed.py.
enum action { PASS, FAIL, SHORT, KILL, EXCHANGE, CHDIR };

enum { LOG_LENGTH = 4096, PATH_LENGTH = 232 };

struct entry {
  int32_t kind;
  int32_t action;  // what was done to it
  int32_t error;   // errno; 0 where the call succeeded
  int32_t number;  // among the calls of the kinds in the mask, from 1; 0: another kind
  int64_t result;
  char path[PATH_LENGTH];
};

struct block {
  _Atomic int32_t armed;
  uint32_t mask;  // of kinds
  int64_t first;  // 0: none
  int64_t times;
  int32_t action;
  int32_t bytes;               // SHORT: number to transfer; 0: half
  int32_t errors[KIND_COUNT];  // FAIL: errno by kind; 0: do not fail
  char root[PATH_MAX];
  char paths[2][PATH_MAX];  // EXCHANGE: paths to exchange; CHDIR: the first is the new directory
  _Atomic int64_t numbered;
  _Atomic int64_t logged;
  struct entry log[LOG_LENGTH];
};

static struct block* block;

__attribute__((constructor)) static void make_block(void) {
  const char* path = getenv("SHIM_BLOCK");
  if (block != NULL || path == NULL) return;
  const int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  void* memory = mmap(NULL, sizeof(struct block), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) block = memory;
  syscall(SYS_close, file);
}

__attribute__((visibility("default"))) struct block* shim_block(void) { return block; }

// --- selected calls, and their changes
// --------------------------------------------------------

struct point {
  struct entry* entry;  // NULL: not on the tree
  enum action action;
  int error;
  struct entry unlogged;  // used if the log is full
};

static int is_armed(void) {
  return block != NULL && atomic_load_explicit(&block->armed, memory_order_relaxed) != 0;
}

static int is_inside(const char* path) {
  const size_t length = strlen(block->root);
  return strncmp(path, block->root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

// The change of a path must not be logged as a call of this process, so it bypasses our functions.
static int change_paths(void) {
  const char* first = block->paths[0];
  if (block->action == CHDIR) return chdir(first);
  static __typeof__(renameat2)* next;
  if (next == NULL) next = (__typeof__(renameat2)*)dlsym(RTLD_NEXT, "renameat2");
  return next(AT_FDCWD, first, AT_FDCWD, block->paths[1], RENAME_EXCHANGE);
}

static void enter(struct point* point, enum kind kind, const char* path) {
  point->entry = NULL;
  point->action = PASS;
  point->error = 0;
  if (!is_inside(path)) return;
  const int64_t place = atomic_fetch_add(&block->logged, 1);
  struct entry* entry = place < LOG_LENGTH ? &block->log[place] : &point->unlogged;
  memset(entry, 0, sizeof *entry);
  entry->kind = kind;
  snprintf(entry->path, sizeof entry->path, "%s", path);
  point->entry = entry;
  if ((block->mask >> kind & 1) == 0) return;
  const int64_t number = atomic_fetch_add(&block->numbered, 1) + 1;
  entry->number = (int32_t)number;
  if (block->first == 0 || number < block->first || number - block->first >= block->times) return;
  if (block->action == KILL) {
    entry->action = KILL;
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  if (block->action == FAIL && block->errors[kind] != 0) {
    point->action = FAIL;
    point->error = block->errors[kind];
  }
  if (block->action == SHORT && (kind == READ || kind == WRITE)) point->action = SHORT;
  entry->action = point->action;
  if ((block->action == EXCHANGE || block->action == CHDIR) && change_paths() == 0) {
    entry->action = block->action;
  }
}

static void leave(struct point* point, int64_t result) {
  if (point->entry == NULL) return;
  point->entry->result = result;
  point->entry->error = result < 0 ? errno : 0;
}

static size_t shortened(const struct point* point, size_t count) {
  if (point->action != SHORT || count < 2) return count;
  const size_t wanted = block->bytes != 0 ? (size_t)block->bytes : count / 2;
  return wanted < count ? wanted : count - 1;
}

static int path_of(int fd, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length < 0) return -1;
  path[length] = 0;
  return 0;
}

static void absolute(int directory, const char* path, char* out) {
  out[0] = 0;
  if (path == NULL) return;
  if (path[0] != '/') {
    if (directory == AT_FDCWD) {
      if (getcwd(out, PATH_MAX) == NULL) out[0] = 0;
    } else if (path_of(directory, out) != 0) {
      out[0] = 0;
    }
    if (path[0] == 0) return;  // AT_EMPTY_PATH
    strncat(out, "/", PATH_MAX - strlen(out) - 1);
  }
  strncat(out, path, PATH_MAX - strlen(out) - 1);
}

static void enter_at(struct point* point, enum kind kind, int directory, const char* path) {
  point->entry = NULL;
  point->action = PASS;
  if (!is_armed()) return;
  const int before = errno;
  char whole[2 * PATH_MAX];
  absolute(directory, path, whole);
  enter(point, kind, whole);
  errno = before;
}

static void enter_fd(struct point* point, enum kind kind, int fd) {
  point->entry = NULL;
  point->action = PASS;
  if (!is_armed()) return;
  const int before = errno;
  char path[PATH_MAX];
  if (path_of(fd, path) == 0) enter(point, kind, path);
  errno = before;
}

// --- the calls
// ------------------------------------------------------------------------------------

#define NEXT(name)               \
  static __typeof__(name)* next; \
  if (next == NULL) next = (__typeof__(name)*)dlsym(RTLD_NEXT, #name)

// Makes the call, unless it must fail. Returns its result or the failure.
#define RETURN(type, call)        \
  type result;                    \
  if (point.action == FAIL) {     \
    errno = point.error;          \
    result = -1;                  \
  } else {                        \
    result = (call);              \
  }                               \
  leave(&point, (int64_t)result); \
  return result

#define AT(kind, directory, path) \
  struct point point;             \
  enter_at(&point, kind, directory, path)

#define FD(kind, fd)  \
  struct point point; \
  enter_fd(&point, kind, fd)

static mode_t mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

#define DEFINE_OPEN(name)                          \
  int name(const char* path, int flags, ...) {     \
    NEXT(name);                                    \
    va_list arguments;                             \
    va_start(arguments, flags);                    \
    const mode_t mode = mode_of(flags, arguments); \
    va_end(arguments);                             \
    AT(OPEN, AT_FDCWD, path);                      \
    RETURN(int, next(path, flags, mode));          \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_OPENAT(name)                                   \
  int name(int directory, const char* path, int flags, ...) { \
    NEXT(name);                                               \
    va_list arguments;                                        \
    va_start(arguments, flags);                               \
    const mode_t mode = mode_of(flags, arguments);            \
    va_end(arguments);                                        \
    AT(OPEN, directory, path);                                \
    RETURN(int, next(directory, path, flags, mode));          \
  }
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

#define DEFINE_CREAT(name)                  \
  int name(const char* path, mode_t mode) { \
    NEXT(name);                             \
    AT(OPEN, AT_FDCWD, path);               \
    RETURN(int, next(path, mode));          \
  }
DEFINE_CREAT(creat)
DEFINE_CREAT(creat64)

// openat2 and, with older versions of libc, renameat2 are called through syscall().
long syscall(long number, ...) {
  NEXT(syscall);
  va_list arguments;
  va_start(arguments, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(arguments, long);
  va_end(arguments);
  struct point point = {.entry = NULL, .action = PASS};
  if (number == SYS_openat2) enter_at(&point, OPEN, (int)a[0], (const char*)a[1]);
  if (number == SYS_renameat2) enter_at(&point, RENAME, (int)a[2], (const char*)a[3]);
  RETURN(long, next(number, a[0], a[1], a[2], a[3], a[4], a[5]));
}

#define DEFINE_READ(name)                                      \
  ssize_t name(int fd, void* data, size_t count) {             \
    NEXT(name);                                                \
    FD(READ, fd);                                              \
    RETURN(ssize_t, next(fd, data, shortened(&point, count))); \
  }
DEFINE_READ(read)

#define DEFINE_PREAD(name)                                             \
  ssize_t name(int fd, void* data, size_t count, off_t offset) {       \
    NEXT(name);                                                        \
    FD(READ, fd);                                                      \
    RETURN(ssize_t, next(fd, data, shortened(&point, count), offset)); \
  }
DEFINE_PREAD(pread)
DEFINE_PREAD(pread64)

ssize_t write(int fd, const void* data, size_t count) {
  NEXT(write);
  FD(WRITE, fd);
  RETURN(ssize_t, next(fd, data, shortened(&point, count)));
}

// A direct write of part of a block fails, so use another descriptor without O_DIRECT.
static ssize_t pwrite_some(int fd, const void* data, size_t count, off_t offset) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const int other = (int)syscall(SYS_openat, AT_FDCWD, link, O_WRONLY | O_CLOEXEC);
  if (other < 0) return -1;
  const ssize_t wrote = syscall(SYS_pwrite64, other, data, count, offset);
  const int failed = errno;
  syscall(SYS_close, other);
  errno = failed;
  return wrote;
}

#define DEFINE_PWRITE(name)                                                       \
  ssize_t name(int fd, const void* data, size_t count, off_t offset) {            \
    NEXT(name);                                                                   \
    FD(WRITE, fd);                                                                \
    RETURN(ssize_t, point.action == SHORT                                         \
                        ? pwrite_some(fd, data, shortened(&point, count), offset) \
                        : next(fd, data, count, offset));                         \
  }
DEFINE_PWRITE(pwrite)
DEFINE_PWRITE(pwrite64)

// A short call with several buffers transfers the first one only.
#define DEFINE_VECTOR(name, kind)                                                              \
  ssize_t name(int fd, const struct iovec* parts, int count) {                                 \
    NEXT(name);                                                                                \
    FD(kind, fd);                                                                              \
    struct iovec first = count > 0 ? parts[0] : (struct iovec){NULL, 0};                       \
    first.iov_len = shortened(&point, first.iov_len);                                          \
    RETURN(ssize_t,                                                                            \
           point.action == SHORT && count > 0 ? next(fd, &first, 1) : next(fd, parts, count)); \
  }
DEFINE_VECTOR(readv, READ)
DEFINE_VECTOR(writev, WRITE)

#define DEFINE_VECTOR_AT(name, kind)                                                      \
  ssize_t name(int fd, const struct iovec* parts, int count, off_t offset) {              \
    NEXT(name);                                                                           \
    FD(kind, fd);                                                                         \
    struct iovec first = count > 0 ? parts[0] : (struct iovec){NULL, 0};                  \
    first.iov_len = shortened(&point, first.iov_len);                                     \
    RETURN(ssize_t, point.action == SHORT && count > 0 ? next(fd, &first, 1, offset)      \
                                                       : next(fd, parts, count, offset)); \
  }
DEFINE_VECTOR_AT(preadv, READ)
DEFINE_VECTOR_AT(preadv64, READ)
DEFINE_VECTOR_AT(pwritev, WRITE)
DEFINE_VECTOR_AT(pwritev64, WRITE)

#define DEFINE_VECTOR_FLAGS(name, kind)                                                          \
  ssize_t name(int fd, const struct iovec* parts, int count, off_t offset, int flags) {          \
    NEXT(name);                                                                                  \
    FD(kind, fd);                                                                                \
    struct iovec first = count > 0 ? parts[0] : (struct iovec){NULL, 0};                         \
    first.iov_len = shortened(&point, first.iov_len);                                            \
    RETURN(ssize_t, point.action == SHORT && count > 0 ? next(fd, &first, 1, offset, flags)      \
                                                       : next(fd, parts, count, offset, flags)); \
  }
DEFINE_VECTOR_FLAGS(preadv2, READ)
DEFINE_VECTOR_FLAGS(preadv64v2, READ)
DEFINE_VECTOR_FLAGS(pwritev2, WRITE)
DEFINE_VECTOR_FLAGS(pwritev64v2, WRITE)

#define DEFINE_ON_FD(name, kind) \
  int name(int fd) {             \
    NEXT(name);                  \
    FD(kind, fd);                \
    RETURN(int, next(fd));       \
  }
DEFINE_ON_FD(fsync, FSYNC)
DEFINE_ON_FD(fdatasync, FSYNC)
DEFINE_ON_FD(syncfs, SYNCFS)

// Linux releases the descriptor even if close fails, and so does a failed call here.
int close(int fd) {
  NEXT(close);
  FD(CLOSE, fd);
  int result = next(fd);
  if (point.action == FAIL) {
    errno = point.error;
    result = -1;
  }
  leave(&point, result);
  return result;
}

int sync_file_range(int fd, off_t offset, off_t bytes, unsigned flags) {
  NEXT(sync_file_range);
  FD(SYNC_RANGE, fd);
  RETURN(int, next(fd, offset, bytes, flags));
}

#define DEFINE_FALLOCATE(name)                            \
  int name(int fd, int mode, off_t offset, off_t bytes) { \
    NEXT(name);                                           \
    FD(FALLOCATE, fd);                                    \
    RETURN(int, next(fd, mode, offset, bytes));           \
  }
DEFINE_FALLOCATE(fallocate)
DEFINE_FALLOCATE(fallocate64)

// This one returns its error.
#define DEFINE_POSIX_FALLOCATE(name)                                                 \
  int name(int fd, off_t offset, off_t bytes) {                                      \
    NEXT(name);                                                                      \
    FD(FALLOCATE, fd);                                                               \
    const int result = point.action == FAIL ? point.error : next(fd, offset, bytes); \
    if (result != 0) errno = result;                                                 \
    leave(&point, result == 0 ? 0 : -1);                                             \
    return result;                                                                   \
  }
DEFINE_POSIX_FALLOCATE(posix_fallocate)
DEFINE_POSIX_FALLOCATE(posix_fallocate64)

#define DEFINE_FTRUNCATE(name)    \
  int name(int fd, off_t bytes) { \
    NEXT(name);                   \
    FD(FTRUNCATE, fd);            \
    RETURN(int, next(fd, bytes)); \
  }
DEFINE_FTRUNCATE(ftruncate)
DEFINE_FTRUNCATE(ftruncate64)

DEFINE_ON_FD(dup, DUP)

// The other commands do not access files.
#define DEFINE_FCNTL(name)                                  \
  int name(int fd, int command, ...) {                      \
    NEXT(name);                                             \
    va_list arguments;                                      \
    va_start(arguments, command);                           \
    void* argument = va_arg(arguments, void*);              \
    va_end(arguments);                                      \
    if (command != F_DUPFD && command != F_DUPFD_CLOEXEC) { \
      return next(fd, command, argument);                   \
    }                                                       \
    FD(DUP, fd);                                            \
    RETURN(int, next(fd, command, argument));               \
  }
DEFINE_FCNTL(fcntl)
DEFINE_FCNTL(fcntl64)

int flock(int fd, int operation) {
  NEXT(flock);
  FD(FLOCK, fd);
  RETURN(int, next(fd, operation));
}

int rename(const char* from, const char* to) {
  NEXT(rename);
  AT(RENAME, AT_FDCWD, to);
  RETURN(int, next(from, to));
}

int renameat(int from_fd, const char* from, int to_fd, const char* to) {
  NEXT(renameat);
  AT(RENAME, to_fd, to);
  RETURN(int, next(from_fd, from, to_fd, to));
}

int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) {
  NEXT(renameat2);
  AT(RENAME, to_fd, to);
  RETURN(int, next(from_fd, from, to_fd, to, flags));
}

int link(const char* from, const char* to) {
  NEXT(link);
  AT(LINK, AT_FDCWD, to);
  RETURN(int, next(from, to));
}

int linkat(int from_fd, const char* from, int to_fd, const char* to, int flags) {
  NEXT(linkat);
  AT(LINK, to_fd, to);
  RETURN(int, next(from_fd, from, to_fd, to, flags));
}

int unlink(const char* path) {
  NEXT(unlink);
  AT(UNLINK, AT_FDCWD, path);
  RETURN(int, next(path));
}

int unlinkat(int directory, const char* path, int flags) {
  NEXT(unlinkat);
  AT((flags & AT_REMOVEDIR) != 0 ? RMDIR : UNLINK, directory, path);
  RETURN(int, next(directory, path, flags));
}

int rmdir(const char* path) {
  NEXT(rmdir);
  AT(RMDIR, AT_FDCWD, path);
  RETURN(int, next(path));
}

int mkdir(const char* path, mode_t mode) {
  NEXT(mkdir);
  AT(MKDIR, AT_FDCWD, path);
  RETURN(int, next(path, mode));
}

int mkdirat(int directory, const char* path, mode_t mode) {
  NEXT(mkdirat);
  AT(MKDIR, directory, path);
  RETURN(int, next(directory, path, mode));
}

#define DEFINE_STAT(name, type)                     \
  int name(const char* path, struct type* status) { \
    NEXT(name);                                     \
    AT(STAT, AT_FDCWD, path);                       \
    RETURN(int, next(path, status));                \
  }
DEFINE_STAT(stat, stat)
DEFINE_STAT(stat64, stat64)
DEFINE_STAT(lstat, stat)
DEFINE_STAT(lstat64, stat64)

#define DEFINE_FSTAT(name, type)          \
  int name(int fd, struct type* status) { \
    NEXT(name);                           \
    FD(STAT, fd);                         \
    RETURN(int, next(fd, status));        \
  }
DEFINE_FSTAT(fstat, stat)
DEFINE_FSTAT(fstat64, stat64)

#define DEFINE_FSTATAT(name, type)                                            \
  int name(int directory, const char* path, struct type* status, int flags) { \
    NEXT(name);                                                               \
    AT(STAT, directory, path);                                                \
    RETURN(int, next(directory, path, status, flags));                        \
  }
DEFINE_FSTATAT(fstatat, stat)
DEFINE_FSTATAT(fstatat64, stat64)

int statx(int directory, const char* path, int flags, unsigned mask, struct statx* status) {
  NEXT(statx);
  AT(STAT, directory, path);
  RETURN(int, next(directory, path, flags, mask, status));
}

DIR* opendir(const char* path) {
  NEXT(opendir);
  AT(OPENDIR, AT_FDCWD, path);
  DIR* result = NULL;
  if (point.action == FAIL) {
    errno = point.error;
  } else {
    result = next(path);
  }
  leave(&point, result == NULL ? -1 : 0);
  return result;
}

DIR* fdopendir(int fd) {
  NEXT(fdopendir);
  FD(OPENDIR, fd);
  DIR* result = NULL;
  if (point.action == FAIL) {
    errno = point.error;
  } else {
    result = next(fd);
  }
  leave(&point, result == NULL ? -1 : 0);
  return result;
}
