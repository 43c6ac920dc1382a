// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <map>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/base/type_name.h>
#include <weft/engine/call/function.h>

namespace weft::call {

namespace {

// The functions of this program, entered before main() and when a library is loaded. A process has
// one table: it lists the code that exists, and holds nothing of any agent.
struct Table {
  ForkMutex mutex{ForkOrder::Engine};
  std::map<std::pair<std::uint64_t, std::uint64_t>, Function> functions WEFT_GUARDED_BY(mutex);
};

Table& table() {
  static auto* const the_table = new Table;  // never destroyed: agents may outlive static objects
  return *the_table;
}

constexpr std::size_t kMostNames = 1000;  // a limit, because peers give names as well
constexpr std::size_t kLongestName = 127;

// Functions that are called by name, as people are shown them. Traces keep pointers to the texts.
struct Names {
  ForkMutex mutex{ForkOrder::Engine};
  std::map<std::pair<const Function*, std::string>, Function, std::less<>> shown
      WEFT_GUARDED_BY(mutex);
};

Names& names() {
  static auto* const the_names = new Names;
  return *the_names;
}

bool runs_by_name(const Function& function) {
  constexpr std::string_view kAll[] = {"run_operator", "run_operator_for_list", "run_script<",
                                       "run_method<"};
  constexpr std::string_view kOurs = "weft::rpc::";
  const std::string_view name = function.name;
  if (!name.starts_with(kOurs)) return false;
  return std::any_of(std::begin(kAll), std::end(kAll),
                     [own = name.substr(kOurs.size())](std::string_view one) {
                       return one.back() == '<' ? own.starts_with(one) : own == one;
                     });
}

bool is_name(std::string_view text) {
  const auto is_part = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.' || c == ':';
  };
  return !text.empty() && text.size() <= kLongestName &&
         std::all_of(text.begin(), text.end(), is_part);
}

// Stops at the first string.
struct FirstText : msgpack::null_visitor {
  std::string_view text;
  bool visit_str(const char* begin, std::uint32_t size) {
    text = {begin, size};
    return false;
  }
};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (auto at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

// Spells a type as a programmer would write it.
std::string readable(std::string text) {
  replace_all(text, "std::__cxx11::", "std::");
  replace_all(text, "[abi:cxx11]", "");  // after the name of a function that returns a std::string
  replace_all(text, "std::basic_string<char, std::char_traits<char>, std::allocator<char> >",
              "std::string");
  replace_all(text, "> >", ">>");
  return text;
}

// Finds the last part of a declaration that is outside all brackets: "int ns::f<a, b>(int) const"
// -> ns::f<a, b>.
std::string without_parameters(const std::string& text) {
  int depth = 0;
  std::size_t begin = 0;
  std::size_t end = text.size();
  const std::string_view hidden = "(anonymous namespace)";
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, hidden.size(), hidden) == 0) {
      i += hidden.size() - 1;
      continue;
    }
    const char c = text[i];
    if (c == '(' && depth == 0) {
      end = i;
      break;
    }
    if (c == '<' || c == '(') ++depth;
    if (c == '>' || c == ')') --depth;
    if (c == ' ' && depth == 0) begin = i + 1;
  }
  return text.substr(begin, end - begin);
}

}  // namespace

namespace detail {

Function entry(std::string name, const std::type_info& signature, bool stays,
               std::vector<std::byte> value, Function::Serve serve) {
  Function function;
  const std::string prefix = stays ? "RRef to the result of " : "";
  function.id = {hash_of(name), hash_of((stays ? "RRef " : "") + std::string(signature.name()))};
  function.name = std::move(name);
  function.signature = prefix + spelled(signature);
  function.value = std::move(value);
  function.serve = serve;
  return function;
}

}  // namespace detail

const Function* enter(Function function) {
  Table& all = table();
  MutexLock lock(all.mutex);
  const auto [place, fresh] =
      all.functions.try_emplace({function.id.name, function.id.signature}, function);
  if (!fresh && place->second.value != function.value) {
    std::fprintf(stderr,
                 "weft: two functions of this program are called %s with the signature %s; remote "
                 "calls could not tell them "
                 "apart. Give one another name, or a namespace; where they are one template in two "
                 "shared libraries, give it the "
                 "attribute visibility(\"default\").\n",
                 function.name.c_str(), function.signature.c_str());
    std::abort();
  }
  return &place->second;
}

const Function* find(const Identity& id) {
  Table& all = table();
  MutexLock lock(all.mutex);
  const auto found = all.functions.find({id.name, id.signature});
  return found == all.functions.end() ? nullptr : &found->second;
}

std::vector<const Function*> named(std::uint64_t name) {
  Table& all = table();
  MutexLock lock(all.mutex);
  std::vector<const Function*> found;
  for (auto it = all.functions.lower_bound({name, 0});
       it != all.functions.end() && it->first.first == name; ++it) {
    found.push_back(&it->second);
  }
  return found;
}

const Function& shown_as(const Function& function, std::string_view text) {
  if (!runs_by_name(function) || !is_name(text)) return function;
  Names& all = names();
  MutexLock lock(all.mutex);
  const std::pair key(&function, std::string(text));
  if (const auto found = all.shown.find(key); found != all.shown.end()) return found->second;
  if (all.shown.size() >= kMostNames) return function;
  Function as_shown = function;
  as_shown.name = text;
  as_shown.signature = "by " + function.name + ", " + function.signature;
  return all.shown.emplace(key, std::move(as_shown)).first->second;
}

const Function& shown_as(const Function& function, std::span<const std::byte> body) {
  if (!runs_by_name(function)) return function;
  constexpr std::size_t kBefore = 64;  // bytes that may precede the name
  FirstText first;
  msgpack::parse(reinterpret_cast<const char*>(body.data()),
                 std::min(body.size(), kBefore + kLongestName), first);
  return shown_as(function, first.text);
}

std::string name_in(const std::type_info& tag) {
  // "…::Tag<&(int ns::f<int>(int))>", or "…::Tag<&ns::f>"
  std::string text = type_name(tag);
  const auto open = text.find("Tag<");
  if (open == std::string::npos || text.back() != '>') return readable(text);
  text = text.substr(open + 4, text.size() - open - 5);
  if (text.starts_with("&")) text.erase(0, 1);
  if (text.starts_with("(") && !text.starts_with("(anonymous") && text.back() == ')')
    text = text.substr(1, text.size() - 2);
  return readable(without_parameters(text));
}

std::string spelled(const std::type_info& type) { return readable(type_name(type)); }

// FNV-1a.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace weft::call
