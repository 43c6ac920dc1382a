// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <deque>
#include <limits>
#include <list>
#include <random>
#include <unordered_map>
#include <unordered_set>

#include <gtest/gtest.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <weft/codec.h>
#include <weft/tests/engine/codec/kept.h>
#include <weft/tests/engine/codec/tree.h>

namespace weft {
namespace {

enum class Colour : std::int8_t { Red = -1, Green = 7 };

struct Inner {
  std::string name;
  std::vector<int> numbers;
  bool operator==(const Inner&) const = default;
  WEFT_FIELDS(name, numbers)
};

struct Outer {
  Inner inner;
  std::map<std::string, at::Tensor> tensors;
  std::optional<double> maybe;
  WEFT_FIELDS(inner, tensors, maybe)
};

struct Wider {
  std::string name;
  std::vector<int> numbers;
  int more = 0;
  WEFT_FIELDS(name, numbers, more)
};

// Fields whose names the macros use themselves.
struct Named {
  int object = 0;
  int packer = 0;
  bool operator==(const Named&) const = default;
  WEFT_FIELDS(object, packer)
};

// Cannot be copied.
struct Owning {
  std::unique_ptr<int> number;
  WEFT_FIELDS(number)
};

struct Packed {
  int a = 0;
  std::string b;
  MSGPACK_DEFINE(a, b)
};

TEST(Codec, KeepsPlainValues) {
  expect_kept(true);
  expect_kept<std::int8_t>(-128);
  expect_kept(std::numeric_limits<std::int64_t>::min());
  expect_kept(std::numeric_limits<std::uint64_t>::max());
  expect_kept(3.25F);
  expect_kept(-0.1);
  expect_kept(u8'a');
  expect_kept(u'\u20ac');
  expect_kept(U'\U0001f9f6');
  expect_kept(std::monostate());
  expect_kept(std::optional(std::monostate()));
  expect_kept(std::string("a\0b\nc", 5));
  expect_kept(Colour::Red);
  expect_kept(Colour::Green);
  expect_kept(std::chrono::milliseconds(-5));
  expect_kept(std::chrono::system_clock::now());
}

TEST(Codec, KeepsTheBitsOfFloats) {
  const auto arrived = [](const auto& value) {
    return decode<std::decay_t<decltype(value)>>(encode(value));
  };
  EXPECT_TRUE(std::signbit(arrived(-0.0)));
  EXPECT_TRUE(std::signbit(arrived(-0.0F)));
  EXPECT_TRUE(std::signbit(arrived(c10::Scalar(-0.0)).toDouble()));
  EXPECT_TRUE(std::signbit(arrived(std::vector<double>{1, -0.0})[1]));
  EXPECT_FALSE(std::signbit(arrived(0.0)));
  EXPECT_TRUE(std::isnan(arrived(std::numeric_limits<double>::quiet_NaN())));
  EXPECT_EQ(arrived(-std::numeric_limits<float>::infinity()),
            -std::numeric_limits<float>::infinity());
  EXPECT_EQ(arrived(18446744073709551616.0), 18446744073709551616.0);
  EXPECT_EQ(arrived(std::numeric_limits<double>::denorm_min()),
            std::numeric_limits<double>::denorm_min());
}

TEST(Codec, KeepsContainers) {
  expect_kept(std::vector<std::string>{"", "x"});
  expect_kept(std::vector<bool>{true, false, true});
  expect_kept(std::array<int, 3>{1, 2, 3});
  expect_kept(std::map<std::string, std::vector<int>>{{"a", {1}}, {"b", {}}});
  expect_kept(std::set<int>{3, 1});
  expect_kept(std::pair<int, std::string>{1, "one"});
  expect_kept(std::tuple<int, double, std::string>{1, 2.5, "x"});
  expect_kept(std::optional<int>());
  expect_kept(std::optional<int>(4));
  expect_kept(std::variant<int, std::string, std::monostate>("text"));
  expect_kept(std::variant<int, std::string, std::monostate>(std::monostate()));
  expect_kept(std::variant<int, std::string, std::monostate>(-3));
}

TEST(Codec, KeepsMoveOnlyOptionals) {
  std::optional<Owning> sent;
  EXPECT_FALSE(decode<std::optional<Owning>>(encode(sent)).has_value());
  sent.emplace(Owning{std::make_unique<int>(4)});
  const auto got = decode<std::optional<Owning>>(encode(sent));
  ASSERT_TRUE(got && got->number);
  EXPECT_EQ(*got->number, 4);
}

// The format of a long double differs between machines.
static_assert(!codec::Travels<long double>::value);
static_assert(!codec::Travels<std::vector<std::chrono::duration<long double>>>::value);
static_assert(codec::Travels<std::chrono::duration<double>>::value);

TEST(Codec, WrongArrayLengthThrows) {
  const auto bytes = encode(std::vector<int>{1, 2});
  EXPECT_EQ((decode<std::array<int, 2>>(bytes)), (std::array<int, 2>{1, 2}));
  EXPECT_THROW((decode<std::array<int, 1>>(bytes)), Error);
  EXPECT_THROW((decode<std::array<int, 3>>(bytes)), Error);
}

// Encodes the tensor with other sizes and strides, as another program may send it.
std::vector<std::byte> forged(const at::Tensor& tensor, const std::vector<std::uint64_t>& sizes,
                              const std::vector<std::uint64_t>& strides) {
  const auto bytes = encode(tensor);
  auto [body, parts] = codec::split(bytes);
  const auto unpacked = msgpack::unpack(reinterpret_cast<const char*>(body.data()), body.size());
  const auto& fields = unpacked.get().via.array;
  codec::Encoded message;
  message.parts = std::move(parts);
  codec::Packer packer(message.body);
  packer.pack_array(fields.size);
  for (std::uint32_t i = 0; i < fields.size; ++i) {
    if (i == 5) {
      packer.pack(sizes);
    } else if (i == 6) {
      packer.pack(strides);
    } else {
      packer.pack(fields.ptr[i]);
    }
  }
  return codec::join(message);
}

TEST(Codec, TensorBeyondItsStorageThrows) {
  const at::Tensor bytes = at::ones({4}, at::kByte), floats = at::ones({8});
  EXPECT_TRUE(decode<at::Tensor>(forged(bytes, {2, 2}, {2, 1})).equal(bytes.view({2, 2})));
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(decode<at::Tensor>(forged(bytes, {5}, {1})), Error);
  EXPECT_THROW(decode<at::Tensor>(forged(bytes, {4}, {~std::uint64_t{0} / 3})), Error)
      << "the last element is at offset 2^64 - 1";
  EXPECT_THROW(decode<at::Tensor>(forged(floats, {2, 2, 2}, {1, kMost, kMost})), Error);
}

template <class Byte>
void expect_exact_bytes() {
  const std::array<Byte, 2> two{static_cast<Byte>(1), static_cast<Byte>(0)};
  const auto bytes = encode(two);
  EXPECT_EQ((decode<std::array<Byte, 2>>(bytes)), two);
  EXPECT_THROW((decode<std::array<Byte, 1>>(bytes)), Error);
  EXPECT_THROW((decode<std::array<Byte, 3>>(bytes)), Error);
  EXPECT_THROW((decode<std::array<Byte, 4096>>(encode(std::string("x")))), Error)
      << "nothing is read beyond its end";
}

TEST(Codec, WrongByteArrayLengthThrows) {
  expect_exact_bytes<char>();
  expect_exact_bytes<unsigned char>();
  expect_exact_bytes<std::byte>();
}

struct Two {
  int values[2] = {1, 2};
  WEFT_FIELDS(values)
};
struct Any {
  std::vector<int> values;
  WEFT_FIELDS(values)
};

TEST(Codec, ArrayFieldsNeedTheExactLength) {
  const auto two = decode<Two>(encode(Any{{3, 4}}));
  EXPECT_EQ(two.values[0], 3);
  EXPECT_EQ(two.values[1], 4);
  EXPECT_EQ(decode<Any>(encode(two)).values, (std::vector<int>{3, 4}));
  for (const auto& other : {Any{{}}, Any{{3}}, Any{{3, 4, 5}}})
    EXPECT_THROW(decode<Two>(encode(other)), Error);
}

TEST(Codec, KeepsStructs) {
  expect_kept(Inner{"n", {1, 2}});
  expect_kept(Named{1, 2});
  const auto packed = there_and_back(Packed{4, "b"});
  EXPECT_EQ(packed.a, 4);
  EXPECT_EQ(packed.b, "b");
  const Outer outer = there_and_back(Outer{{"in", {7}}, {{"w", at::ones({2, 2})}}, 1.5});
  EXPECT_EQ(outer.inner, (Inner{"in", {7}}));
  EXPECT_EQ(outer.maybe, 1.5);
  expect_same(outer.tensors.at("w"), at::ones({2, 2}));
}

TEST(Codec, KeepsLibtorchsSmallValues) {
  EXPECT_EQ(there_and_back(c10::Scalar(true)).toBool(), true);
  EXPECT_EQ(there_and_back(c10::Scalar(-7)).toLong(), -7);
  EXPECT_EQ(there_and_back(c10::Scalar(0.5)).toDouble(), 0.5);
  EXPECT_TRUE(there_and_back(c10::Scalar(0.5)).isFloatingPoint());
  EXPECT_EQ(there_and_back(c10::Scalar(c10::complex<double>(1, -2))).toComplexDouble(),
            c10::complex<double>(1, -2));
  expect_kept(c10::ScalarType::BFloat16);
  EXPECT_EQ(decode<c10::Device>(encode(c10::Device(c10::kCUDA, 3))), c10::Device(c10::kCUDA, 3));
}

// Devices have no default value to be decoded into.
TEST(Codec, KeepsDevicesInEveryContainer) {
  const c10::Device cpu("cpu");
  const c10::Device gpu("cuda:3");
  using Pair = std::pair<c10::Device, c10::Device>;
  using Either = std::variant<c10::Device, int>;
  expect_kept(std::vector<c10::Device>{cpu, gpu});
  expect_kept(std::array<c10::Device, 2>{gpu, cpu});
  expect_kept(std::deque<c10::Device>{gpu});
  expect_kept(std::list<c10::Device>{gpu, gpu});
  expect_kept(std::unordered_set<c10::Device>{gpu, cpu});
  expect_kept(std::map<std::string, c10::Device>{{"a", gpu}, {"b", cpu}});
  expect_kept(std::unordered_map<int, c10::Device>{{1, gpu}});
  expect_kept(std::unordered_map<c10::Device, int>{{gpu, 1}});
  expect_kept(std::map<std::string, std::vector<Pair>>{{"worker1", {{cpu, gpu}, {gpu, cpu}}},
                                                       {"worker2", {}}});
  expect_kept(std::vector<std::tuple<int, c10::Device>>{{1, gpu}});
  expect_kept(std::vector<std::array<c10::Device, 2>>{{gpu, cpu}});
  expect_kept(std::optional<c10::Device>(gpu));
  expect_kept(std::optional<Pair>(Pair(gpu, cpu)));
  expect_kept(std::optional<Pair>());
  expect_kept(std::vector<std::optional<Pair>>{Pair(gpu, cpu), std::nullopt});
  expect_kept(Either(gpu));
  expect_kept(Either(7));
  expect_kept(std::vector<Either>{7, gpu});
  expect_kept(std::map<std::string, Either>{{"a", gpu}});
  expect_kept(std::array<Either, 2>{gpu, 7});
}

TEST(Codec, WrongDeviceContainersThrow) {
  const c10::Device gpu("cuda:3");
  const auto bytes = encode(std::vector<c10::Device>{gpu, gpu});
  EXPECT_THROW((decode<std::array<c10::Device, 1>>(bytes)), Error);
  EXPECT_THROW((decode<std::array<c10::Device, 3>>(bytes)), Error);
  EXPECT_THROW((decode<std::map<int, c10::Device>>(bytes)), Error);
  EXPECT_THROW((decode<std::vector<c10::Device>>(encode(std::map<int, int>{{1, 2}}))), Error);
  EXPECT_THROW((decode<std::vector<c10::Device>>(encode(std::vector<int>{1, 2}))), Error);
  EXPECT_THROW((decode<std::deque<c10::Device>>(encode(5))), Error);
  EXPECT_THROW((decode<std::map<int, c10::Device>>(encode(std::map<int, int>{{1, 2}}))), Error);
  EXPECT_THROW((decode<std::optional<std::pair<int, c10::Device>>>(encode(5))), Error);
  EXPECT_THROW((decode<std::variant<c10::Device, int>>(encode(std::pair(2, 7)))), Error);
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    EXPECT_THROW(decode<std::vector<c10::Device>>(std::span(bytes).first(cut)), Error);
  }
}

TEST(Codec, KeepsNestedEmptyOptionals) {
  using Inside = std::optional<int>;
  expect_kept(std::optional<Inside>());
  expect_kept(std::optional<Inside>(Inside()));
  expect_kept(std::optional<Inside>(Inside(4)));
  expect_kept(std::optional<std::optional<Inside>>(std::optional<Inside>(Inside())));
  EXPECT_THROW(decode<std::optional<Inside>>(encode(4)), Error);
  using Pointer = std::shared_ptr<int>;
  EXPECT_FALSE(there_and_back(std::optional<Pointer>()).has_value());
  EXPECT_EQ(there_and_back(std::optional<Pointer>(Pointer())), std::optional<Pointer>(Pointer()));
  EXPECT_EQ(**there_and_back(std::optional<Pointer>(std::make_shared<int>(4))), 4);
  EXPECT_TRUE(there_and_back(std::optional(std::unique_ptr<int>())).has_value());
  EXPECT_EQ(*there_and_back(std::make_shared<Inside>()), Inside());
  EXPECT_EQ(*there_and_back(std::make_unique<Inside>()), Inside());
}

TEST(Codec, UnknownEnumValuesAreRefused) {
  expect_kept(at::kFloat);
  expect_kept(at::kSparseCsr);
  expect_kept(at::MemoryFormat::ChannelsLast);
  for (const int number : {-100, -1, 77, 127}) {
    EXPECT_THROW(decode<c10::ScalarType>(encode(static_cast<std::int8_t>(number))), Error)
        << number;
    EXPECT_THROW(decode<c10::Layout>(encode(static_cast<std::int8_t>(number))), Error) << number;
    EXPECT_THROW(decode<c10::MemoryFormat>(encode(static_cast<std::int8_t>(number))), Error)
        << number;
  }
}

TEST(Codec, KeepsTensorsOfAllDtypes) {
  for (const auto type :
       {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kFloat, at::kDouble,
        at::kBool, at::kBFloat16, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e5m2,
        at::kFloat8_e4m3fn, at::kUInt16, at::kUInt32, at::kUInt64}) {
    SCOPED_TRACE(c10::toString(type));
    expect_same(there_and_back(at::arange(6).reshape({2, 3}).to(type)),
                at::arange(6).reshape({2, 3}).to(type));
  }
  // libtorch cannot compare tensors of these dtypes, so their bytes are compared.
  for (const auto type :
       {at::kComplexHalf, at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz, at::kFloat8_e8m0fnu}) {
    SCOPED_TRACE(c10::toString(type));
    const auto sent = at::arange(1, 7, at::kFloat).reshape({2, 3}).to(type);
    const auto got = there_and_back(sent);
    EXPECT_EQ(got.scalar_type(), type);
    ASSERT_EQ(got.sizes(), sent.sizes());
    EXPECT_EQ(std::memcmp(got.const_data_ptr(), sent.const_data_ptr(), sent.nbytes()), 0);
  }
}

TEST(Codec, KeepsShapesStridesAndFlags) {
  const auto base = at::arange(24, at::kFloat).reshape({4, 6});
  for (const auto& tensor :
       {base, base.t(), base.slice(1, 1, 5, 2), base.select(0, 2), at::ones({3, 1}).expand({3, 4}),
        at::scalar_tensor(2.0), at::empty({0}), at::empty({3, 0, 2}),
        base.as_strided({2, 3}, {1, 7}, 3), at::ones({2}).requires_grad_(),
        at::complex(at::ones({2}), at::ones({2})).conj()}) {
    expect_same(there_and_back(tensor), tensor);
  }
  EXPECT_FALSE(there_and_back(at::Tensor()).defined());
}

TEST(Codec, SharedStorageStaysShared) {
  const auto base = at::zeros({8});
  auto got = there_and_back(std::vector<at::Tensor>{base, base.slice(0, 4), base});
  got[0][5] = 3;
  EXPECT_EQ(got[1][1].item<float>(), 3);
  EXPECT_EQ(got[2][5].item<float>(), 3);
  EXPECT_LT(encode(std::vector<at::Tensor>(10, at::zeros({1000}))).size(), 2 * 4000U);
}

TEST(Codec, OnlyUsedStorageIsWritten) {
  const auto large = at::zeros({1 << 20});
  EXPECT_LT(encode(large.slice(0, 5000, 6024)).size(), 1024 * 4 + 200U);
  expect_same(there_and_back(large.slice(0, 5000, 6024)), large.slice(0, 5000, 6024));
}

// The receiver must not see the memory between them.
TEST(Codec, DisjointRangesTravelApart) {
  const auto large = at::zeros({1 << 10, 1 << 10});
  const auto first = large.select(0, 0).fill_(1);
  const auto last = large.select(0, 1023).fill_(2);
  const auto bytes = encode(std::vector<at::Tensor>{last, first, last.slice(0, 1000)});
  EXPECT_LT(bytes.size(), 2 * 4096 + 300U);
  const auto got = decode<std::vector<at::Tensor>>(bytes);
  expect_same(got[0], last);
  expect_same(got[1], first);
  expect_same(got[2], last.slice(0, 1000));
  EXPECT_EQ(got[0].storage().nbytes(), 4096U);
  EXPECT_EQ(got[1].storage().nbytes(), 4096U);
  got[0][1023].fill_(3);
  EXPECT_EQ(got[2][23].item<float>(), 3);
}

// The number of a part is written before its final value is known.
TEST(Codec, BridgingTensorJoinsTwoRanges) {
  const auto base = at::zeros({1000});
  const auto other = at::ones({3});
  const auto got = there_and_back(std::vector<at::Tensor>{
      base.slice(0, 0, 10), base.slice(0, 900), other, base.slice(0, 5, 950), other, base});
  got[5].fill_(7);
  EXPECT_TRUE(at::equal(got[0], at::full({10}, 7.0)));
  EXPECT_TRUE(at::equal(got[1], at::full({100}, 7.0)));
  EXPECT_TRUE(at::equal(got[3], at::full({945}, 7.0)));
  EXPECT_TRUE(at::equal(got[2], other));
  got[2].fill_(5);
  EXPECT_TRUE(at::equal(got[4], at::full({3}, 5.0)));
}

TEST(Codec, InterleavedColumnsStayShared) {
  const auto base = at::arange(40, at::kFloat).reshape({10, 4});
  const auto got = there_and_back(std::vector<at::Tensor>{
      base.select(1, 3), base.select(1, 0), base.slice(1, 2, 4), base.slice(0, 9).select(1, 1)});
  expect_same(got[0], base.select(1, 3));
  expect_same(got[1], base.select(1, 0));
  expect_same(got[2], base.slice(1, 2, 4));
  expect_same(got[3], base.slice(0, 9).select(1, 1));
  got[0].fill_(-1);
  expect_same(got[1], base.select(1, 0));
  EXPECT_TRUE(at::equal(got[2].select(1, 1), at::full({10}, -1.0)));
}

// The numbers of parts take one, two and three bytes, and all of them become smaller.
TEST(Codec, ManyTensorsShareFewStorages) {
  const auto base = at::arange(5000, at::kLong);
  std::vector<at::Tensor> sent;
  for (std::int64_t i = 0; i < 5000; ++i)
    sent.push_back(base.slice(0, (i * 7) % 5000, (i * 7) % 5000 + 1));
  const auto got = there_and_back(sent);
  ASSERT_EQ(got.size(), sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i)
    ASSERT_EQ(got[i].item<std::int64_t>(), sent[i].item<std::int64_t>()) << i;
  EXPECT_EQ(got[0].storage().nbytes(), 5000 * 8U) << "they touch: one range";
  EXPECT_TRUE(got[0].is_alias_of(got[4999]));
}

TEST(Codec, SmallestGapsTravelOverTheLimit) {
  const auto base = at::zeros({4000, 64});
  std::vector<at::Tensor> sent;
  for (std::int64_t i = 0; i < 300; ++i)
    sent.push_back(base.select(0, 2 * i).fill_(i));  // gaps of a row
  sent.push_back(base.select(0, 3000).fill_(3000));  // a gap of 2400 rows
  const auto bytes = encode(sent);
  EXPECT_LT(bytes.size(), 346 * 256 + 20000U);
  const auto got = decode<std::vector<at::Tensor>>(bytes);
  std::set<const void*> storages;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    ASSERT_TRUE(at::equal(got[i], sent[i])) << i;
    storages.insert(got[i].storage().data());
  }
  EXPECT_EQ(storages.size(), codec::kMaxApart);
  EXPECT_EQ(got.back().storage().nbytes(), 64 * 4U);
}

TEST(Codec, MixedElementSizesKeepTheirPlaces) {
  const auto bytes = at::arange(64, at::kByte);
  const auto odd = bytes.slice(0, 1, 5);
  const auto words = bytes.view(at::kInt).slice(0, 3, 6);
  const auto got = there_and_back(std::vector<at::Tensor>{odd, words});
  expect_same(got[0], odd);
  expect_same(got[1], words);
}

TEST(Codec, ModulesTravelAsTheirState) {
  torch::nn::Sequential one(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  torch::nn::Sequential other(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  decode<ModuleState>(encode(state_of(one))).load_into(*other);
  for (const auto& item : one->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), other->named_parameters()[item.key()]));
  torch::nn::Linear narrow(2, 4);
  EXPECT_THROW(state_of(one).load_into(*narrow), Error);
}

TEST(Codec, UnsupportedTensorsAreNamed) {
  const auto quantized = at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8);
  try {
    encode(quantized);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(std::string(error.what()).find("QInt8"), std::string::npos) << error.what();
  }
  EXPECT_THROW(encode(at::empty({2}, at::TensorOptions().device(at::kMeta))), Error);
  const auto freed = at::ones({4});
  freed.storage().set_nbytes(8);  // as programs do that free parameters between their uses
  try {
    encode(freed);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(std::string(error.what()).find("resized or freed"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(decode<at::Tensor>(encode(freed.slice(0, 0, 2))).numel(), 2)
      << "the rest of it can be sent";
}

// libtorch uses them for gradients that are known to be zero: they have no memory until a
// computation uses them.
TEST(Codec, ZerosWithoutMemoryTravelAsZeros) {
  const auto zeros = at::_efficientzerotensor({2, 3}, at::kDouble);
  const auto kept = decode<at::Tensor>(encode(zeros));
  EXPECT_TRUE(at::equal(kept, at::zeros({2, 3}, at::kDouble)));
}

TEST(Codec, TooDeepNestingIsRefusedBySender) {
  const std::string headers(100, '\x91');  // array headers, inside a string
  expect_kept(headers);
  constexpr int kDeepestTree = codec::kDeepest / 2;
  EXPECT_EQ(harness::levels_of(decode<harness::Tree>(encode(harness::grown(kDeepestTree)))),
            kDeepestTree);
  try {
    encode(harness::grown(kDeepestTree + 1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(std::string(error.what()).find("more than 64 containers"), std::string::npos)
        << error.what();
  }
  // The number of containers side by side is not limited.
  EXPECT_EQ(
      decode<std::vector<std::vector<int>>>(encode(std::vector<std::vector<int>>(500))).size(),
      500U);
}

TEST(Codec, WrongTypeOrFieldCountThrows) {
  EXPECT_THROW(decode<int>(encode(std::string("x"))), Error);
  EXPECT_THROW(decode<Wider>(encode(Inner{"n", {1}})), Error);
  EXPECT_THROW(decode<Inner>(encode(Wider{"n", {1}, 2})), Error);
  EXPECT_THROW(decode<std::uint8_t>(encode(256)), Error);
  EXPECT_THROW((decode<std::variant<int>>(encode(std::pair<int, int>(4, 4)))), Error);
}

TEST(Codec, TruncatedBytesThrow) {
  const auto whole = encode(
      Outer{{"in", {7, 8, 9}}, {{"w", at::ones({5})}, {"v", at::ones({3}, at::kByte)}}, 1.5});
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    EXPECT_THROW(decode<Outer>(std::span(whole).first(bytes)), Error) << bytes;
  }
  auto longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_THROW(decode<Outer>(longer), Error);
}

// Up to three random bytes get random values: decoding throws an Error or gives a usable value.
TEST(Codec, ForeignBytesThrowOrGiveAValue) {
  const auto whole = encode(Outer{{"in", {7}}, {{"w", at::ones({2, 3})}}, 1.5});
  std::mt19937 random(1);
  int thrown = 0;
  for (int round = 0; round < 20000; ++round) {
    auto bytes = whole;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    try {
      const Outer value = decode<Outer>(bytes);
      for (const auto& [name, tensor] : value.tensors) {
        if (tensor.defined() && tensor.numel() > 0 && tensor.numel() < 1000)
          static_cast<void>(tensor.clone());
      }
    } catch (const Error&) {
      ++thrown;
    }
  }
  EXPECT_GT(thrown, 1000);
}

}  // namespace
}  // namespace weft
