// SPDX-License-Identifier: Apache-2.0
#include <weft/base/error.h>
#include <weft/engine/codec/values.h>

namespace weft::codec {

namespace {

enum class ScalarForm : std::uint8_t { Bool, Integer, Floating, Complex, Unsigned };

}  // namespace

void pack_scalar(Packer& packer, const c10::Scalar& scalar) {
  const auto begin = [&](ScalarForm form, std::uint32_t values) {
    packer.pack_array(1 + values);
    packer.pack_uint8(static_cast<std::uint8_t>(form));
  };
  if (scalar.isSymbolic()) throw Error(Blame::Caller, "a symbolic scalar cannot be sent");
  if (scalar.isBoolean()) {
    begin(ScalarForm::Bool, 1);
    packer.pack(scalar.toBool());
  } else if (scalar.isComplex()) {
    const auto value = scalar.toComplexDouble();
    begin(ScalarForm::Complex, 2);
    packer.pack_double(value.real());
    packer.pack_double(value.imag());
  } else if (scalar.isFloatingPoint()) {
    begin(ScalarForm::Floating, 1);
    packer.pack_double(scalar.toDouble());
  } else if (scalar.type() == c10::kUInt64) {
    begin(ScalarForm::Unsigned, 1);
    packer.pack_uint64(scalar.toUInt64());
  } else {
    begin(ScalarForm::Integer, 1);
    packer.pack_int64(scalar.toLong());
  }
}

c10::Scalar unpack_scalar(const msgpack::object& object) {
  if (object.type != msgpack::type::ARRAY || object.via.array.size < 2) throw msgpack::type_error();
  const auto& fields = object.via.array;
  const auto form = static_cast<ScalarForm>(fields.ptr[0].as<std::uint8_t>());
  if (fields.size != (form == ScalarForm::Complex ? 3U : 2U)) throw msgpack::type_error();
  switch (form) {
    case ScalarForm::Bool: return fields.ptr[1].as<bool>();
    case ScalarForm::Integer: return fields.ptr[1].as<std::int64_t>();
    case ScalarForm::Unsigned: return fields.ptr[1].as<std::uint64_t>();
    case ScalarForm::Floating: return fields.ptr[1].as<double>();
    case ScalarForm::Complex:
      return c10::complex<double>(fields.ptr[1].as<double>(), fields.ptr[2].as<double>());
  }
  throw msgpack::type_error();
}

}  // namespace weft::codec
