#include "format/dtype.h"

#include <gtest/gtest.h>

namespace torch_ckpt::format {
namespace {

TEST(Dtype, IsFoundByItsNameInTorch) {
  const Dtype* dtype = find_dtype("bfloat16");
  ASSERT_NE(dtype, nullptr);
  EXPECT_EQ(dtype->name, "bfloat16");
  EXPECT_EQ(dtype->storage, "BFloat16Storage");
  EXPECT_EQ(dtype->item_bytes, 2);
}

TEST(Dtype, IsFoundByItsLegacyStorageClass) {
  EXPECT_EQ(find_dtype_of_storage("LongStorage"), find_dtype("int64"));
}

TEST(Dtype, WithoutALegacyClassIsFoundOnlyByName) {
  ASSERT_NE(find_dtype("float8_e5m2"), nullptr);
  EXPECT_TRUE(find_dtype("float8_e5m2")->storage.empty());
  EXPECT_EQ(find_dtype_of_storage(""), nullptr);
}

TEST(Dtype, OfOtherThanPlainTensorsIsNotFound) {
  EXPECT_EQ(find_dtype("qint8"), nullptr);
  EXPECT_EQ(find_dtype("int4"), nullptr);
  EXPECT_EQ(find_dtype(""), nullptr);
  EXPECT_EQ(find_dtype_of_storage("QInt8Storage"), nullptr);
  EXPECT_EQ(find_dtype_of_storage("UntypedStorage"), nullptr);
}

}  // namespace
}  // namespace torch_ckpt::format
