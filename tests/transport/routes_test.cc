// SPDX-License-Identifier: Apache-2.0
// Which route to a peer is chosen, and what the error says if there is none.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/tests/harness/mail.h>
#include <weft/transport/registry.h>
#include <weft/transport/routes.h>

namespace weft::transport {
namespace {

using harness::bytes_of;
using harness::Mailbox;
using testing::HasSubstr;

// A process that listens on some transports, and the messages it receives.
struct Host {
  explicit Host(const std::vector<std::string>& names) : routes(names) {
    offers =
        routes.listen({.loop = loop, .interface_address = {}, .accepted = [this](auto connection) {
                         accepted.push_back(std::move(connection));
                         mail = std::make_unique<Mailbox>(*accepted.back(), loop);
                         has_mail = true;
                       }});
  }
  ~Host() { routes.close(); }

  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("host");
  Routes routes;
  std::vector<Offer> offers;
  std::vector<std::shared_ptr<Connection>> accepted;
  std::unique_ptr<Mailbox> mail;
  std::atomic<bool> has_mail{
      false};  // drive() reads it on the test's thread while the loop's thread accepts
};

Error refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was refused";
  return {Blame::Caller, ""};
}

std::string chosen(const Routes& routes, const std::vector<Offer>& offers) {
  const auto loop = std::make_shared<EventLoop>("caller");
  const auto connection =
      routes.connect(offers, {.loop = loop, .deadline = Deadline::in(std::chrono::seconds(10))});
  return std::string(connection->transport());
}

// These tests are built without libtorch, hence without Gloo.
TEST(Registry, SaysWhyABackendIsLeftOut) {
  const auto all = left_out();
  const auto gloo =
      std::find_if(all.begin(), all.end(), [](const LeftOut& one) { return one.name == "gloo"; });
  ASSERT_NE(gloo, all.end());
  EXPECT_FALSE(gloo->why.empty());
  for (const LeftOut& one : all) {
    EXPECT_TRUE(std::ranges::none_of(backends(), [&](const Backend& backend) {
      return backend.name == one.name;
    })) << one.name;
  }
  try {
    open("gloo");
    FAIL() << "it was opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(),
                HasSubstr("no backend 'gloo' in this build (" + std::string(gloo->why) + ")"));
  }
}

TEST(Routes, TakesTheBestThatBothHave) {
  Host host({"tcp", "shm"});
  ASSERT_EQ(host.offers.size(), 2u);
  const Routes all;
  EXPECT_EQ(chosen(all, host.offers), "shm");
  std::reverse(host.offers.begin(), host.offers.end());
  EXPECT_EQ(chosen(all, host.offers), "shm");
  EXPECT_EQ(chosen(Routes({"tcp"}), host.offers), "tcp");
  EXPECT_EQ(chosen(Routes({"tcp", "shm"}), host.offers), "tcp") << "a list of names sets the order";
  std::erase_if(host.offers, [](const Offer& offer) { return offer.transport == "shm"; });
  EXPECT_EQ(chosen(all, host.offers), "tcp");
}

TEST(Routes, ChosenTransportCarriesMessages) {
  Host host({"shm", "tcp"});
  const auto loop = std::make_shared<EventLoop>("caller");
  const auto connection = Routes().connect(
      host.offers, {.loop = loop, .deadline = Deadline::in(std::chrono::seconds(10))});
  connection->send(bytes_of("hello"), {}, nullptr, {});
  host.loop->drive([&] { return host.has_mail.load(); }, Deadline::in(std::chrono::seconds(10)));
  ASSERT_TRUE(host.mail);
  EXPECT_EQ(host.mail->next().header, "hello");
}

TEST(Routes, PassesOverUnreachableAddresses) {
  Host host({"shm", "tcp"});
  for (Offer& offer : host.offers) {
    if (offer.transport == "shm") offer.address = "another-boot/1/1/3";
  }
  std::atomic<int> said{0};
  {
    const log::Capture capture([&](LogLevel level, std::string_view text) {
      if (text == "transport 'shm' is passed over for 'tcp': it is on another host" &&
          level == LogLevel::Info)
        ++said;
    });
    const Routes all;
    EXPECT_EQ(chosen(all, host.offers), "tcp");
    EXPECT_EQ(chosen(all, host.offers), "tcp");
  }
  static bool is_known = false;  // the tests of one process may be repeated
  EXPECT_EQ(said, std::exchange(is_known, true) ? 0 : 1) << "logged once, not for every peer";
  const Error why = refusal([&] { chosen(Routes({"shm"}), host.offers); });
  EXPECT_EQ(why.blame(), Blame::Unsupported);
  EXPECT_THAT(why.text(), HasSubstr("it is on another host"));
}

TEST(Routes, PassesOverFailedWhileOneIsLeft) {
  Host host({"shm", "tcp"});
  const Routes all;
  const auto loop = std::make_shared<EventLoop>("caller");
  const auto taken = [&](const Routes::Failed& failed) {
    const ConnectOptions options{.loop = loop, .deadline = Deadline::in(std::chrono::seconds(10))};
    return std::string(all.connect(host.offers, options, failed)->transport());
  };
  EXPECT_EQ(taken({{"shm", "it broke"}}), "tcp");
  EXPECT_EQ(taken({{"tcp", "it broke"}}), "shm");
  EXPECT_EQ(taken({{"shm", "it broke"}, {"tcp", "as well"}}), "shm")
      << "if all have failed, the best of them is taken";
}

// Logged once per process, hence the new process.
TEST(RoutesDeathTest, LogWhyATransportIsUnusable) {
  std::vector<testing::Matcher<const std::string&>> reasons;
  for (const Backend& backend : backends()) {
    const auto opened = backend.open();
    if (opened) continue;
    reasons.push_back(HasSubstr("a transport cannot be used here; " + std::string(backend.name) +
                                ": " + opened.error().text()));
  }
  if (reasons.empty()) GTEST_SKIP() << "every backend can be used here";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto be_made = [] {
    const log::Capture capture(
        [](LogLevel, std::string_view text) { std::cerr << text << std::endl; });
    const Routes all;
    std::exit(0);
  };
  EXPECT_EXIT(be_made(), testing::ExitedWithCode(0), testing::AllOfArray(reasons));
}

TEST(Routes, SaysWhyEachTransportIsUnusable) {
  const Error why = refusal([] {
    chosen(Routes({"shm", "tcp"}), {{"tcp", "nonsense"}, {"pigeon", "loft"}});
  });
  EXPECT_EQ(why.blame(), Blame::Unsupported);
  EXPECT_THAT(why.text(), HasSubstr("shm: the peer does not offer it"));
  EXPECT_THAT(why.text(), HasSubstr("tcp: "));
  EXPECT_THAT(why.text(), HasSubstr("this process has shm, tcp"));
}

TEST(Routes, NamingAnUnusableOneIsAnError) {
  EXPECT_EQ(refusal([] { Routes({"pigeon"}); }).blame(), Blame::Caller);
  int unusable = 0;
  for (const Backend& backend : backends()) {
    const auto opened = backend.open();
    const std::string name(backend.name);
    if (!opened) {
      ++unusable;
      const Error why = refusal([&] { Routes({name}); });
      EXPECT_EQ(why.blame(), Blame::Unsupported) << name;
      EXPECT_THAT(why.text(), HasSubstr(opened.error().text())) << name;
    } else if (opened.value()->connector() == nullptr) {
      const Error why = refusal([&] { Routes({name}); });
      EXPECT_EQ(why.blame(), Blame::Caller) << name;
      EXPECT_THAT(why.text(), HasSubstr("collectives only")) << name;
    }
  }
  if (unusable == 0) GTEST_SKIP() << "every backend can be used here";
}

}  // namespace
}  // namespace weft::transport
