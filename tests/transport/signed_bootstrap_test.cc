// SPDX-License-Identifier: Apache-2.0
// Values of the store that only processes with the secret can write.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/transport/signed_bootstrap.h>

namespace weft::transport {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Bytes = Bootstrap::Bytes;

Bytes bytes(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

class SignedValues : public testing::Test {
 protected:
  Bytes get(const std::string& key) {
    return store.get(key, Deadline::in(std::chrono::seconds(9)));
  }
  void expect_refused(const std::string& key, const std::string& why) {
    try {
      get(key);
      ADD_FAILURE() << "a forged value of " << key << " is read";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), AllOf(HasSubstr("'" + key + "'"), HasSubstr(why),
                                      HasSubstr("ProcessGroupOptions::secret")));
    }
  }

  std::shared_ptr<harness::MemoryBootstrap> below = std::make_shared<harness::MemoryBootstrap>();
  SignedBootstrap store{below, "sixteen at random", "group x"};
};

TEST_F(SignedValues, AreReadAsWritten) {
  for (const std::string text : {"", "x", "a longer text"}) {
    store.set("key", bytes(text));
    EXPECT_EQ(get("key"), bytes(text));
    EXPECT_NE(below->get("key", Deadline::never()), bytes(text));
    EXPECT_TRUE(is_signed(below->get("key", Deadline::never())));
  }
  EXPECT_FALSE(is_signed({}));
  EXPECT_FALSE(is_signed(Bytes(100)));
}

// HMAC-SHA-256("sixteen at random", "weft store value 1" 7 3 "group x" "key" "value"), where the
// sizes of scope and key take 8 bytes each.
TEST_F(SignedValues, HaveTheStatedBytes) {
  const Bytes stored = store.sealed("key", bytes("value"));
  ASSERT_EQ(stored.size(), 5u + 32 + 13);
  EXPECT_EQ(Bytes(stored.begin(), stored.begin() + 5), bytes("value"));
  EXPECT_EQ(std::to_integer<int>(stored[5]), 0xd4);
  EXPECT_EQ(std::to_integer<int>(stored[36]), 0x32);
  EXPECT_EQ(Bytes(stored.end() - 13, stored.end()), bytes("weft signed 1"));
}

TEST_F(SignedValues, UnsignedValueIsRefused) {
  for (const std::string text :
       {"", "forged", "a forged value that is longer than a signature is"}) {
    below->set("key", bytes(text));
    expect_refused("key", "has no signature");
  }
}

TEST_F(SignedValues, OtherSecretKeyOrScopeIsRefused) {
  SignedBootstrap(below, "sixteen but other", "group x").set("key", bytes("v"));
  expect_refused("key", "not signed with this rank's secret");
  SignedBootstrap(below, "sixteen at random", "group y").set("key", bytes("v"));
  expect_refused("key", "not signed with this rank's secret");
  store.set("key", bytes("v"));
  below->set("another", below->get("key", Deadline::never()));
  expect_refused("another", "not signed with this rank's secret");
}

// The same bytes in the same order, cut elsewhere.
TEST_F(SignedValues, BytesCannotMoveBetweenKeyAndValue) {
  store.set("ab", bytes("c"));
  Bytes moved = below->get("ab", Deadline::never());
  moved.insert(moved.begin(), std::byte{'b'});
  below->set("a", moved);
  expect_refused("a", "not signed with this rank's secret");
}

TEST_F(SignedValues, EveryChangedBitIsRefused) {
  store.set("key", bytes("value"));
  const Bytes good = below->get("key", Deadline::never());
  for (std::size_t at = 0; at < good.size(); ++at) {
    Bytes changed = good;
    changed[at] ^= std::byte{1};
    below->set("key", changed);
    expect_refused("key", "");
    below->set("key", Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(at)));
    expect_refused("key", "");
  }
}

TEST_F(SignedValues, CompareSetSeesTheValuesWithin) {
  EXPECT_TRUE(store.compare_set("key", {}, bytes("one")));
  EXPECT_FALSE(store.compare_set("key", {}, bytes("two")));
  EXPECT_FALSE(store.compare_set("key", bytes("two"), bytes("three")));
  EXPECT_TRUE(store.compare_set("key", bytes("one"), bytes("two")));
  EXPECT_EQ(get("key"), bytes("two"));
}

TEST_F(SignedValues, CompareSetReplacesAnEmptyValue) {
  EXPECT_TRUE(store.compare_set("key", {}, bytes("one")));
  EXPECT_TRUE(store.compare_set("key", bytes("one"), {}));
  EXPECT_EQ(get("key"), Bytes());
  EXPECT_TRUE(store.compare_set("key", {}, bytes("two")));
  EXPECT_EQ(get("key"), bytes("two"));
  EXPECT_FALSE(store.compare_set("key", {}, bytes("three")));
}

TEST_F(SignedValues, WithoutASecretSignedOnesAreRefused) {
  SignedBootstrap open(below, "", "group x");
  open.set("key", bytes("v"));
  EXPECT_EQ(below->get("key", Deadline::never()), bytes("v"));
  EXPECT_EQ(open.get("key", Deadline::never()), bytes("v"));
  EXPECT_FALSE(open.compare_set("key", {}, bytes("w")));
  EXPECT_TRUE(open.compare_set("key", bytes("v"), bytes("w")));
  store.set("key", bytes("v"));
  try {
    open.get("key", Deadline::never());
    ADD_FAILURE() << "a signed value is read without a secret";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("'key'"), HasSubstr("is signed"),
                                    HasSubstr("ProcessGroupOptions::secret")));
  }
}

TEST_F(SignedValues, WorkersAreToldTheirOwnOption) {
  SignedBootstrap workers(below, "sixteen at random", "job", SignedBootstrap::Users::Workers);
  below->set("key", bytes("forged"));
  try {
    workers.get("key", Deadline::never());
    ADD_FAILURE() << "a forged value is read";
  } catch (const Error& error) {
    EXPECT_THAT(error.text(),
                AllOf(HasSubstr("the worker that wrote it was given no secret"),
                      HasSubstr("give all workers of the job the same rpc::Options::secret")));
  }
}

TEST_F(SignedValues, CountersAndKeysAreTheStores) {
  EXPECT_EQ(store.add("count", 2), 2);
  EXPECT_EQ(below->add("count", 1), 3);
  EXPECT_FALSE(store.exists("key"));
  store.set("key", bytes("v"));
  EXPECT_TRUE(store.exists("key"));
  store.erase("key");
  EXPECT_FALSE(below->exists("key"));
}

}  // namespace
}  // namespace weft::transport
