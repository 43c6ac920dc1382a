// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/rpc.h>

namespace named {

int plain(int, std::string) { return 0; }
template <class T>
T generic(std::vector<T>) {
  return T();
}
std::string text(int) { return ""; }
struct Thing {
  static double fixed(int) { return 0; }
  std::string written() { return ""; }
  int both() { return 0; }
  int both() const { return 1; }
};
int get(Thing&) { return 0; }
int get(const Thing&) { return 1; }
struct Special : Thing {};
int get(Special&) { return 2; }
int get(weft::RRef<Thing>) { return 3; }
struct Made {
  explicit Made(int) {}
};
namespace {
int hidden(int) { return 0; }
}  // namespace
int overloaded(int) { return 0; }
int overloaded(double) { return 0; }

}  // namespace named

static int local(int) { return 0; }

namespace weft::call {
namespace {

template <auto F>
const Function& of() {
  return detail::Called<detail::FunctionBody<F>>::entered;
}

TEST(FunctionNames, AreQualifiedWithTemplateArguments) {
  EXPECT_EQ(of<&named::plain>().name, "named::plain");
  EXPECT_EQ(of<&named::generic<int>>().name, "named::generic<int>");
  EXPECT_EQ(of<&named::Thing::fixed>().name, "named::Thing::fixed");
  EXPECT_EQ(of<&named::text>().name, "named::text");
  using Written = rref::detail::MethodBody<&named::Thing::written, named::Thing>;
  EXPECT_EQ(detail::Called<Written>::entered.name, "named::Thing::written");
  EXPECT_EQ(of<&named::hidden>().name, "named::(anonymous namespace)::hidden");
  EXPECT_EQ(of<&local>().name, "local");
}

TEST(FunctionNames, SignaturesUseDecayedTypes) {
  EXPECT_EQ(of<&named::plain>().signature, "int (int, std::string)");
  EXPECT_EQ(of<&named::Thing::fixed>().signature, "double (int)");
}

TEST(FunctionNames, OverloadsDifferInSignatureOnly) {
  const auto& one = of<static_cast<int (*)(int)>(&named::overloaded)>();
  const auto& other = of<static_cast<int (*)(double)>(&named::overloaded)>();
  EXPECT_EQ(one.name, other.name);
  EXPECT_EQ(one.id.name, other.id.name);
  EXPECT_NE(one.id.signature, other.id.signature);
  EXPECT_EQ(named(one.id.name).size(), 2U);
}

TEST(FunctionNames, OverloadsMayDifferInConstAlone) {
  using Plain = rref::detail::MethodBody<static_cast<int (named::Thing::*)()>(&named::Thing::both),
                                         named::Thing>;
  using Const =
      rref::detail::MethodBody<static_cast<int (named::Thing::*)() const>(&named::Thing::both),
                               named::Thing>;
  const auto& plain = detail::Called<Plain>::entered;
  const auto& constant = detail::Called<Const>::entered;
  EXPECT_EQ(plain.name, constant.name);
  EXPECT_EQ(plain.signature, "int (weft::RRef<named::Thing>)");
  EXPECT_EQ(constant.signature, "int (weft::RRef<named::Thing const>)");
}

// Two functions of one identity would end the program at its start.
TEST(FunctionNames, SignatureSaysHowTheValueIsTaken) {
  using Plain =
      rref::detail::MethodBody<static_cast<int (*)(named::Thing&)>(&named::get), named::Special>;
  using Const = rref::detail::MethodBody<static_cast<int (*)(const named::Thing&)>(&named::get),
                                         named::Special>;
  using Own =
      rref::detail::MethodBody<static_cast<int (*)(named::Special&)>(&named::get), named::Special>;
  const auto& called = of<static_cast<int (*)(weft::RRef<named::Thing>)>(&named::get)>();
  EXPECT_EQ(detail::Called<Plain>::entered.signature,
            "int (weft::RRef<named::Special>, named::Thing&)");
  EXPECT_EQ(detail::Called<Const>::entered.signature,
            "int (weft::RRef<named::Special>, named::Thing const&)");
  EXPECT_EQ(detail::Called<Own>::entered.signature,
            "int (weft::RRef<named::Special>, named::Special&)");
  EXPECT_EQ(named(called.id.name).size(), 4U);
}

// Programs of other builds call by these identities, so no name in them may ever change.
TEST(FunctionNames, IdentitiesMatchTheDocument) {
  const Identity called = of<&named::Thing::fixed>().id;
  EXPECT_EQ(called, (Identity{hash_of("named::Thing::fixed"), hash_of("FdiE")}));
  const Identity created =
      rref::detail::Created<detail::FunctionBody<&named::Thing::fixed>>::entered.id;
  EXPECT_EQ(created, (Identity{hash_of("named::Thing::fixed"), hash_of("RRef FdiE")}));
  const Identity made =
      rref::detail::Created<rref::detail::ConstructorBody<named::Made, int>>::entered.id;
  EXPECT_EQ(made,
            (Identity{hash_of("constructor of named::Made"), hash_of("RRef FN5named4MadeEiE")}));
  using Fixed = rref::detail::MethodBody<&named::Thing::fixed, named::Made>;
  EXPECT_EQ(detail::Called<Fixed>::entered.id,
            (Identity{hash_of("named::Thing::fixed"), hash_of("FdN4weft4RRefIN5named4MadeEEEiE")}));
  EXPECT_EQ(hash_of("a"), 0xaf63dc4c8601ec8c);
}

// These names are part of the wire as well, with those of the types that they take and return.
TEST(FunctionNames, OwnFunctionsKeepTheirIdentities) {
  const std::pair<const char*, const char*> own[] = {
      {"weft::rpc::internal::alive", "void ()"},
      {"weft::rpc::internal::activity", "weft::rpc::Activity ()"},
      {"weft::rpc::internal::join_shutdown", "weft::rpc::Outcome ()"},
      {"weft::rpc::internal::awaits_verdict", "bool ()"},
      {"weft::rpc::internal::doing", "std::string ()"},
      {"weft::rpc::internal::call_waits", "void (unsigned long, std::string)"},
      {"weft::rpc::internal::progress_of", "std::string (unsigned long, bool)"},
      {"weft::rref::internal::will_not_come", "void (unsigned long, weft::rpc::Outcome)"},
  };
  for (const auto& [name, signature] : own) {
    const auto found = named(hash_of(name));
    ASSERT_EQ(found.size(), 1u) << name;
    EXPECT_EQ(found.front()->signature, signature) << name;
  }
  EXPECT_EQ(detail::Called<rref::detail::CopyBody<int>>::entered.signature,
            "weft::rpc::Outcome (weft::RRef<int>, int)");
  // autograd::internal::reach() takes them.
  EXPECT_EQ(spelled(typeid(MessageId)), "weft::rpc::MessageId");
}

TEST(FunctionTable, FindsOnlyEnteredFunctions) {
  EXPECT_EQ(find(of<&named::plain>().id), &of<&named::plain>());
  EXPECT_EQ(find({1, 2}), nullptr);
  EXPECT_TRUE(named(1).empty());
}

TEST(FunctionTableDeathTest, TwoFunctionsOfOneIdentityAbort) {
  EXPECT_DEATH(
      {
        Function other = of<&named::plain>();
        other.value[0] ^= std::byte{1};
        enter(other);
      },
      "two functions of this program are called named::plain");
}

}  // namespace
}  // namespace weft::call
