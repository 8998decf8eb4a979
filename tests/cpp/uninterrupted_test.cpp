#include "os/uninterrupted.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace torch_ckpt::os {
namespace {

TEST(Uninterrupted, ACallIsRepeatedWhileSignalsInterruptIt) {
  int calls = 0;
  const int result = uninterrupted([&] {
    ++calls;
    errno = EINTR;
    return calls < 3 ? -1 : 7;
  });
  EXPECT_EQ(result, 7);
  EXPECT_EQ(calls, 3);
}

TEST(Uninterrupted, AnyOtherErrorIsReturned) {
  int calls = 0;
  const int result = uninterrupted([&] {
    ++calls;
    errno = EMFILE;
    return -1;
  });
  EXPECT_EQ(result, -1);
  EXPECT_EQ(errno, EMFILE);
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace torch_ckpt::os
