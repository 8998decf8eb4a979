#include "error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <exception>
#include <new>
#include <set>
#include <stdexcept>

namespace torch_ckpt {
namespace {

TEST(Error, MessageOfASystemErrorHasOperationPathOffsetAndReason) {
  EXPECT_EQ(system_error(ENOSPC, "pwrite", "/ckpt/__0_1.distcp", 8388608).message(),
            "pwrite /ckpt/__0_1.distcp at byte 8388608: No space left on device");
}

TEST(Error, MessageOmitsUnknownParts) {
  EXPECT_EQ(system_error(EACCES, "open", "/ckpt/a").message(), "open /ckpt/a: Permission denied");
  EXPECT_EQ(format_error(Errc::not_a_zip, "too short").message(), "too short");
}

TEST(Error, MessageOfAFormatErrorHasPathAndOffset) {
  Error error = format_error(Errc::checksum_mismatch, "the bytes are damaged", 0);
  error.path = "/ckpt/a";
  EXPECT_EQ(error.message(), "/ckpt/a at byte 0: the bytes are damaged");
}

TEST(Error, DetailPrecedesTheSystemsReason) {
  Error error = system_error(ENOMEM, "mmap", "");
  error.detail = "no 4096 bytes of host memory";
  EXPECT_EQ(error.message(), "mmap: no 4096 bytes of host memory: Cannot allocate memory");
}

TEST(Error, AFailedAllocationIsASystemError) {
  const Error error = exception_error(std::make_exception_ptr(std::bad_alloc()), "load");
  EXPECT_EQ(error.code, Errc::system);
  EXPECT_EQ(error.message(), "load: Cannot allocate memory");
}

TEST(Error, EveryCodeHasAUniqueName) {
  std::set<std::string_view> names;
  const int last = static_cast<int>(Errc::internal);
  for (int code = 0; code <= last; ++code) names.insert(name(static_cast<Errc>(code)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(last) + 1);
  EXPECT_FALSE(names.contains("unknown"));
}

TEST(Error, TheValueOfAFailedResultThrowsALogicErrorWithTheMessage) {
  const Result<int> failed = system_error(EIO, "fsync", "/ckpt/a");
  try {
    static_cast<void>(failed.value());
    FAIL() << "value() returned";
  } catch (const std::logic_error& caught) {
    EXPECT_NE(std::string(caught.what()).find("fsync /ckpt/a"), std::string::npos);
  }
}

}  // namespace
}  // namespace torch_ckpt
