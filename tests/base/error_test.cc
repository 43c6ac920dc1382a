// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/base/result.h>

namespace weft {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

TEST(Error, SaysBlameAndPlace) {
  const Error error(Blame::PeerLost, "send to rank 3: connection reset");
  EXPECT_THAT(error.what(),
              HasSubstr("send to rank 3: connection reset [PeerLost at tests/base/error_test.cc:"));
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_EQ(error.text(), "send to rank 3: connection reset");
}

TEST(Error, ContextKeepsBlamePlaceAndCode) {
  const Error inner = system_error(Blame::Busy, "open", ENOMEM);
  const Error outer = inner.within("joining group 'a'");
  EXPECT_EQ(outer.blame(), Blame::Busy);
  EXPECT_EQ(outer.native_code(), ENOMEM);
  EXPECT_EQ(outer.place().line, inner.place().line);
  EXPECT_EQ(outer.text(), "joining group 'a': open: Cannot allocate memory");
}

TEST(Error, ConversionKeepsErrorsAndWrapsOthers) {
  const auto caught = [](auto thrown) {
    return to_error(std::make_exception_ptr(thrown), Blame::Remote);
  };
  EXPECT_EQ(caught(Error(Blame::Timeout, "late")).blame(), Blame::Timeout);
  EXPECT_EQ(caught(std::logic_error("odd")).blame(), Blame::Remote);
  EXPECT_EQ(caught(std::logic_error("odd")).text(), "odd");
  EXPECT_EQ(caught(7).blame(), Blame::Remote);
}

TEST(Error, EveryBlameHasAName) {
  for (const Blame blame : {Blame::Caller, Blame::Busy, Blame::Timeout, Blame::PeerLost,
                            Blame::Unsupported, Blame::Device, Blame::Cancelled, Blame::Remote}) {
    EXPECT_FALSE(name(blame).empty());
  }
}

TEST(ErrorDeathTest, BrokenInvariantAbortsWithTheText) {
  EXPECT_DEATH(broken("two owners"), "two owners");
}

TEST(Result, HoldsAValueOrThrowsItsError) {
  const Result<int> good(3);
  EXPECT_TRUE(good.ok());
  EXPECT_EQ(good.value(), 3);
  const Result<int> bad(Error(Blame::Caller, "no"));
  EXPECT_FALSE(bad);
  EXPECT_EQ(bad.error().blame(), Blame::Caller);
  EXPECT_THROW(bad.value(), Error);
}

TEST(Error, DescribesAnyThrownObject) {
  struct NoText : std::exception {
    const char* what() const noexcept override { return nullptr; }
  };
  const auto text_of_thrown = [](const auto& thrown) {
    return text_of(std::make_exception_ptr(thrown));
  };
  EXPECT_EQ(text_of_thrown(std::runtime_error("plain")), "plain");
  EXPECT_NE(text_of_thrown(NoText()).find("NoText with a null what()"), std::string::npos);
  EXPECT_EQ(text_of_thrown(std::string("a string")), "a string");
  EXPECT_EQ(text_of_thrown(static_cast<const char*>("a literal")), "a literal");
  EXPECT_EQ(text_of_thrown(static_cast<const char*>(nullptr)), "a null char*");
  EXPECT_EQ(text_of_thrown(7), "an object of type int, which is not a std::exception");
  EXPECT_LT(text_of_thrown(std::string(1 << 20, 'x')).size(), std::size_t{20} << 10);
  EXPECT_EQ(to_error(std::make_exception_ptr(NoText()), Blame::Remote).blame(), Blame::Remote);
  try {
    try {
      throw std::runtime_error("inner");
    } catch (...) {
      std::throw_with_nested(std::runtime_error("outer"));
    }
  } catch (...) {
    EXPECT_EQ(text_of(std::current_exception()), "outer, caused by: inner");
  }
}

TEST(Deadline, NeitherPassesEarlyNorOverflows) {
  EXPECT_FALSE(Deadline::never().passed());
  EXPECT_EQ(Deadline::never().remaining(), milliseconds::max());
  EXPECT_TRUE(Deadline::in(std::chrono::nanoseconds::max()).is_never());
  EXPECT_TRUE(Deadline::in(milliseconds::max()).is_never())
      << "it overflows as a number of nanoseconds";
  EXPECT_TRUE(Deadline::in(std::chrono::hours(24 * 366 * 1000)).is_never());
  EXPECT_GT(Deadline::in(std::chrono::hours(24 * 365 * 100)).remaining(),
            std::chrono::hours(24 * 365 * 99));
  EXPECT_TRUE(Deadline::in(milliseconds(-1)).passed());
  EXPECT_EQ(Deadline::in(milliseconds(-1)).remaining(), milliseconds(0));
  EXPECT_GT(Deadline::in(std::chrono::hours(1)).remaining(), std::chrono::minutes(59));
  EXPECT_EQ(Deadline::sooner(Deadline::never(), Deadline::in(milliseconds(1))).is_never(), false);
}

TEST(Deadline, IsDescribedInReadableUnits) {
  EXPECT_EQ(describe(milliseconds(300)), "300 ms");
  EXPECT_EQ(describe(milliseconds(1500)), "1.5 s");
  EXPECT_EQ(describe(std::chrono::minutes(30)), "30 min");
  EXPECT_EQ(describe(milliseconds::max()), "no limit");
}

}  // namespace
}  // namespace weft
