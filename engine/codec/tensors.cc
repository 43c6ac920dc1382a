// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include <ATen/ops/_validate_sparse_compressed_tensor_args.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/sparse_compressed_tensor.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Layout.h>

#include <weft/base/error.h>
#include <weft/engine/codec/sent_bytes.h>
#include <weft/engine/codec/tensors.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::codec {

namespace {

// The first field of a tensor's description.
enum class Form : std::uint8_t { Undefined = 0, Dense = 1, Coo = 2, Compressed = 3 };

// The numbers by which dtypes travel, since libtorch may change its own. Append only.
constexpr at::ScalarType kTypes[] = {at::kByte,
                                     at::kChar,
                                     at::kShort,
                                     at::kInt,
                                     at::kLong,
                                     at::kHalf,
                                     at::kFloat,
                                     at::kDouble,
                                     at::kComplexHalf,
                                     at::kComplexFloat,
                                     at::kComplexDouble,
                                     at::kBool,
                                     at::kBFloat16,
                                     at::kFloat8_e5m2,
                                     at::kFloat8_e4m3fn,
                                     at::kFloat8_e5m2fnuz,
                                     at::kFloat8_e4m3fnuz,
                                     at::kUInt16,
                                     at::kUInt32,
                                     at::kUInt64,
                                     at::kFloat8_e8m0fnu};

std::uint8_t code_of(at::ScalarType type) {
  for (std::size_t i = 0; i < std::size(kTypes); ++i) {
    if (kTypes[i] == type) return static_cast<std::uint8_t>(i);
  }
  throw Error(Blame::Caller,
              std::string("a tensor of dtype ") + c10::toString(type) +
                  " cannot be sent; dequantize it, or send its int_repr, scale and zero point");
}

// Greater slots are refused.
constexpr std::uint64_t kMaxRecorded = 1 << 20;

constexpr at::Layout kCompressed[] = {at::kSparseCsr, at::kSparseCsc, at::kSparseBsr,
                                      at::kSparseBsc};

[[noreturn]] void refuse(const at::Tensor& tensor, const char* what, const char* instead) {
  throw Error(Blame::Caller, "a tensor " + std::string(what) + " cannot be sent (" +
                                 std::string(c10::toString(tensor.scalar_type())) + ", device " +
                                 tensor.device().str() + "); " + instead);
}

// Applies the operations that libtorch defers until a tensor is read: a conjugation, a negation,
// zeros without memory.
at::Tensor computed(const at::Tensor& given) {
  at::Tensor tensor = given.detach().resolve_conj().resolve_neg();
  return tensor._is_zerotensor() ? at::zeros(tensor.sizes(), tensor.options()) : tensor;
}

[[noreturn]] void foreign(const std::string& what) {
  throw Error(Blame::Caller, "these bytes do not describe a tensor: " + what);
}

// True for memory that has an owner outside of libtorch, which need not wait for us: the storage
// has no deleter.
bool is_borrowed(const c10::Storage& storage) {
  return storage.nbytes() > 0 && storage.data_ptr().get_context() == nullptr;
}

// True if the storage is copied when it is packed, because its owner may free it before it has been
// sent.
bool is_copied(const c10::Storage& storage) {
  return storage.device().is_cpu() && is_borrowed(storage);
}

c10::Storage copy_of(const c10::Storage& storage, std::uint64_t begin, std::uint64_t bytes) {
  at::Tensor copy = at::empty({static_cast<std::int64_t>(bytes)},
                              at::TensorOptions().dtype(at::kByte).device(storage.device()));
  std::memcpy(copy.mutable_data_ptr(), static_cast<const std::byte*>(storage.data()) + begin,
              bytes);
  return copy.storage();
}

std::vector<std::int64_t> integers(const msgpack::object& object, const char* what) {
  if (object.type != msgpack::type::ARRAY || object.via.array.size > 64)
    foreign(std::string("invalid ") + what);
  std::vector<std::int64_t> numbers;
  for (std::uint32_t i = 0; i < object.via.array.size; ++i) {
    const auto& one = object.via.array.ptr[i];
    if (one.type != msgpack::type::POSITIVE_INTEGER ||
        one.via.u64 > std::numeric_limits<std::int64_t>::max()) {
      foreign(std::string("invalid ") + what);
    }
    numbers.push_back(static_cast<std::int64_t>(one.via.u64));
  }
  return numbers;
}

std::uint64_t number(const msgpack::object& object, const char* what) {
  if (object.type != msgpack::type::POSITIVE_INTEGER) foreign(std::string("invalid ") + what);
  return object.via.u64;
}

void pack_integers(Packer& packer, at::IntArrayRef numbers) {
  packer.pack_array(static_cast<std::uint32_t>(numbers.size()));
  for (const std::int64_t number : numbers) packer.pack_int64(number);
}

// Number of elements from the first to the last that a tensor of these sizes and strides touches;
// nullopt on overflow. No dimension may be empty.
std::optional<std::uint64_t> extent(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::uint64_t step = 0;
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(sizes[i] - 1),
                               static_cast<std::uint64_t>(strides[i]), &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return std::nullopt;
    }
  }
  if (__builtin_add_overflow(last, std::uint64_t{1}, &last)) return std::nullopt;
  return last;
}

std::uint64_t aligned(std::uint64_t begin) { return begin / kPartAlignment * kPartAlignment; }

// Overwrites a number that msgpack has written with a smaller one, in the same number of bytes.
void overwrite(std::byte* place, std::size_t number) {
  constexpr std::byte kOneByte{0xcc};
  constexpr std::byte kTwoBytes{0xcd};
  const auto low = static_cast<std::byte>(number & 0xff);
  if (*place == kTwoBytes) {
    place[1] = static_cast<std::byte>(number >> 8);
    place[2] = low;
  } else if (*place == kOneByte) {
    place[1] = low;
  } else {
    *place = low;
  }
}

// A tensor in the part's memory, `offset` elements from its beginning.
at::Tensor over(const Part& part, at::ScalarType type, at::IntArrayRef sizes,
                at::IntArrayRef strides, std::uint64_t offset) {
  const auto key = part.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(part.storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(type));
  impl->set_sizes_and_strides(sizes, strides, static_cast<std::int64_t>(offset));
  return at::Tensor(std::move(impl));
}

// libtorch accepts indices that are out of range or out of order, and would write there. Its own
// check begins a parallel region, which takes a quarter of a second if there are more threads than
// processors.
void check_coo(const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef sizes,
               bool coalesced) {
  if (!indices.is_cpu())
    return at::_validate_sparse_coo_tensor_args(indices, values, sizes, coalesced);
  const bool fits = indices.scalar_type() == at::kLong && indices.dim() == 2 && values.dim() > 0 &&
                    indices.size(0) + values.dim() - 1 == static_cast<std::int64_t>(sizes.size()) &&
                    indices.size(1) == values.size(0);
  if (!fits) foreign("its indices, values and sizes do not fit together");
  const std::int64_t dims = indices.size(0), entries = indices.size(1);
  const auto index = [data = static_cast<const std::int64_t*>(indices.const_data_ptr()),
                      row = indices.stride(0),
                      column = indices.stride(1)](std::int64_t dim, std::int64_t entry) {
    return data[dim * row + entry * column];
  };
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    for (std::int64_t entry = 0; entry < entries; ++entry) {
      if (index(dim, entry) < 0 || index(dim, entry) >= sizes[static_cast<std::size_t>(dim)]) {
        foreign("an index is beyond its sizes");
      }
    }
  }
  if (!coalesced) return;
  for (std::int64_t entry = 1; entry < entries; ++entry) {
    std::int64_t dim = 0;
    while (dim < dims && index(dim, entry - 1) == index(dim, entry)) ++dim;
    if (dim == dims || index(dim, entry - 1) > index(dim, entry))
      foreign("its indices are marked as sorted, and are not");
  }
}

// Unpacks the indices or values of a sparse tensor.
at::Tensor part_of(const TensorReader& reader, const msgpack::object& object) {
  at::Tensor part = reader.unpack(object);
  if (!part.defined() || part.layout() != at::kStrided || part.requires_grad())
    foreign("invalid indices or values");
  return part;
}

// Returns a copy: the indices are checked once and trusted from then on, but their memory may also
// belong to another tensor of the message, which may be written to. The copy is no larger than the
// bytes received.
at::Tensor indices_of(const TensorReader& reader, const msgpack::object& object) {
  const at::Tensor part = part_of(reader, object);
  if (!part.is_non_overlapping_and_dense()) foreign("its indices overlap or have gaps");
  if (!part.is_cpu()) return part.clone();
  // empty_like keeps the strides; clone() of a large tensor begins a parallel region.
  at::Tensor copy = at::empty_like(part);
  if (part.nbytes() > 0) std::memcpy(copy.mutable_data_ptr(), part.const_data_ptr(), part.nbytes());
  return copy;
}

// libtorch reads the values of a compressed tensor as if they were contiguous, without checking
// their strides.
at::Tensor compressed_values_of(const TensorReader& reader, const msgpack::object& object,
                                at::Layout layout) {
  const at::Tensor part = part_of(reader, object);
  const bool has_blocks = layout == at::kSparseBsr || layout == at::kSparseBsc;
  if (has_blocks ? !part.is_non_overlapping_and_dense() : !part.is_contiguous()) {
    foreign("its values overlap or have gaps");
  }
  return part;
}

at::Tensor dense(const at::Tensor& part) {
  return part.is_non_overlapping_and_dense() ? part : part.contiguous();
}

}  // namespace

void TensorWriter::pack_storage(Packer& packer, const c10::Storage& storage, std::uint64_t begin,
                                std::uint64_t end) {
  const auto found = std::find_if(storages_.begin(), storages_.end(), [&](const c10::Storage& one) {
    return one.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  const auto index = static_cast<std::size_t>(found - storages_.begin());
  if (found == storages_.end()) {
    if (storages_.size() == kMaxStorages) {
      throw Error(Blame::Caller, "one message holds at most " + std::to_string(kMaxStorages) +
                                     " tensors; send several");
    }
    storages_.push_back(storage);
  }
  const std::size_t place = body_.size();
  uses_.push_back({index, begin, end, place});
  // Parts are numbered in the order of their first use, so this number is no less than the one with
  // which take_parts() overwrites it.
  packer.pack_uint64(std::min(uses_.size(), kMaxStorages));
  if (body_.size() == place) {
    uses_.pop_back();
    throw Error(
        Blame::Caller,
        "a tensor was packed into another buffer than its message; use the packer that is passed");
  }
}

void TensorWriter::watch() { watched_ = std::make_shared<SentBytes>(); }

void TensorWriter::pack(Packer& packer, const at::Tensor& given) {
  if (!given.defined()) {
    packer.pack_array(1);
    packer.pack_uint8(static_cast<std::uint8_t>(Form::Undefined));
    return;
  }
  const at::Tensor tensor = computed(given);
  if (tensor.is_meta()) refuse(tensor, "without data (meta)", "make it on a device that has data");
  if (tensor.is_nested()) refuse(tensor, "of nested layout", "send its parts, tensor.unbind()");
  if (tensor.layout() == at::kStrided) {
    if (!tensor.has_storage()) refuse(tensor, "without a storage", "send a copy, tensor.clone()");
    packer.pack_array(7);
    packer.pack_uint8(static_cast<std::uint8_t>(Form::Dense));
    pack_requires_grad(packer, given);
    pack_dense(packer, tensor);
  } else if (tensor.layout() == at::kSparse) {
    packer.pack_array(6);
    packer.pack_uint8(static_cast<std::uint8_t>(Form::Coo));
    pack_requires_grad(packer, given);
    tensor.is_coalesced() ? packer.pack_true() : packer.pack_false();
    pack_integers(packer, tensor.sizes());
    pack(packer, dense(tensor._indices()));
    pack(packer, tensor._values());
  } else {
    const auto found = std::find(std::begin(kCompressed), std::end(kCompressed), tensor.layout());
    if (found == std::end(kCompressed)) refuse(tensor, "of this layout", "send tensor.to_dense()");
    const bool rows = *found == at::kSparseCsr || *found == at::kSparseBsr;
    packer.pack_array(7);
    packer.pack_uint8(static_cast<std::uint8_t>(Form::Compressed));
    pack_requires_grad(packer, given);
    packer.pack_uint8(static_cast<std::uint8_t>(found - std::begin(kCompressed)));
    pack_integers(packer, tensor.sizes());
    pack(packer, dense(rows ? tensor.crow_indices() : tensor.ccol_indices()));
    pack(packer, dense(rows ? tensor.col_indices() : tensor.row_indices()));
    const bool has_blocks = *found == at::kSparseBsr || *found == at::kSparseBsc;
    pack(packer, has_blocks ? dense(tensor.values()) : tensor.values().contiguous());
  }
}

// Writes true or false; for a tensor that the sender has recorded, its slot, counted from 1; 0 for
// a tensor that the sender has computed but not recorded.
void TensorWriter::pack_requires_grad(Packer& packer, const at::Tensor& tensor) {
  if (!tensor.requires_grad()) {
    packer.pack_false();
  } else if (!recording_) {
    const bool is_computed = is_computed_ ? is_computed_(tensor) : false;
    is_computed ? packer.pack_uint64(0) : packer.pack_true();
  } else {
    recorded_.push_back(tensor);
    packer.pack_uint64(recorded_.size());
  }
}

// Writes dtype, storage (its number in the message), byte offset in the sender's storage, sizes,
// strides.
void TensorWriter::pack_dense(Packer& packer, const at::Tensor& tensor) {
  packer.pack_uint8(code_of(tensor.scalar_type()));
  std::uint64_t begin = 0;
  if (tensor.numel() > 0) {
    const auto element = tensor.element_size();
    begin = static_cast<std::uint64_t>(tensor.storage_offset()) * element;
    const std::uint64_t end = begin + *extent(tensor.sizes(), tensor.strides()) * element;
    if (end > tensor.storage().nbytes() || tensor.storage().data() == nullptr) {
      refuse(tensor, "whose storage has been resized or freed", "send it before that");
    }
    pack_storage(packer, tensor.storage(), begin, end);
    if (watched_ && !is_copied(tensor.storage())) watched_->add(tensor);
  } else if (!tensor.device().is_cpu()) {
    pack_storage(packer, tensor.storage(), 0, 0);  // tells the receiver the device
  } else {
    packer.pack_uint64(0);  // no storage
  }
  packer.pack_uint64(begin);
  pack_integers(packer, tensor.sizes());
  pack_integers(packer, tensor.strides());
}

std::vector<Part> TensorWriter::take_parts() {
  std::vector<Range> all = ranges();
  join_nearest(all);
  std::sort(uses_.begin(), uses_.end(),
            [](const Use& a, const Use& b) { return a.place < b.place; });
  std::vector<Part> parts;
  parts.reserve(all.size());
  for (const Use& use : uses_) {
    Range& range = all[use.range];
    if (range.number == 0) {
      parts.push_back(part_over(range));
      range.number = parts.size();
    }
    overwrite(body_.mutable_data() + use.place, range.number);
  }
  uses_.clear();
  storages_.clear();
  if (watched_) watched_->add(parts);
  return parts;
}

// Ranges that overlap or touch, once their beginnings are rounded down to kPartAlignment, become
// one. Sorts uses_ and returns ranges in the same order.
std::vector<TensorWriter::Range> TensorWriter::ranges() {
  std::sort(uses_.begin(), uses_.end(), [](const Use& a, const Use& b) {
    return std::tie(a.storage, a.begin) < std::tie(b.storage, b.begin);
  });
  std::vector<Range> all;
  for (Use& use : uses_) {
    const bool is_first = all.empty() || all.back().storage != use.storage;
    if (is_first || (all.back().end > 0 && aligned(use.begin) > all.back().end)) {
      all.push_back({use.storage, use.begin, use.end});
    } else {
      Range& range = all.back();
      if (range.end == 0) range.begin = use.begin;
      range.end = std::max(range.end, use.end);
    }
    use.range = all.size() - 1;
  }
  return all;
}

// Joins ranges across the smallest gaps until there are at most kMaxApart, or one for each storage.
void TensorWriter::join_nearest(std::vector<Range>& ranges) {
  const std::size_t most = std::max(kMaxApart, storages_.size());
  if (ranges.size() <= most) return;
  // Bytes of the gap, and the index of the range after it.
  std::vector<std::pair<std::uint64_t, std::size_t>> gaps;
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].storage == ranges[i - 1].storage)
      gaps.emplace_back(ranges[i].begin - ranges[i - 1].end, i);
  }
  const auto surplus = gaps.begin() + static_cast<std::ptrdiff_t>(ranges.size() - most);
  std::nth_element(gaps.begin(), surplus, gaps.end());
  std::vector<bool> joins(ranges.size());
  std::for_each(gaps.begin(), surplus, [&](const auto& gap) { joins[gap.second] = true; });
  std::vector<Range> joined;
  std::vector<std::size_t> place(ranges.size());
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (joins[i]) {
      joined.back().end = ranges[i].end;
    } else {
      joined.push_back(ranges[i]);
    }
    place[i] = joined.size() - 1;
  }
  for (Use& use : uses_) use.range = place[use.range];
  ranges = std::move(joined);
}

Part TensorWriter::part_over(const Range& range) const {
  const c10::Storage& storage = storages_[range.storage];
  const std::uint64_t begin = aligned(range.begin);
  const std::uint64_t bytes = range.end - begin;
  if (is_copied(storage)) return {begin, bytes, copy_of(storage, begin, bytes), 0};
  return {begin, bytes, storage, begin};
}

at::Tensor TensorReader::unpack(const msgpack::object& object) const {
  if (object.type != msgpack::type::ARRAY || object.via.array.size == 0)
    foreign("it is not a list of fields");
  const auto& fields = object.via.array;
  const auto form = static_cast<Form>(number(fields.ptr[0], "form"));
  if (form == Form::Undefined && fields.size == 1) return at::Tensor();
  if (fields.size < 6) foreign("invalid form");
  const auto& gradient = fields.ptr[1];
  const bool has_slot = gradient.type == msgpack::type::POSITIVE_INTEGER;
  const std::uint64_t slot = has_slot ? gradient.via.u64 : 0;
  if (has_slot ? slot > kMaxRecorded : gradient.type != msgpack::type::BOOLEAN)
    foreign("invalid gradient");
  at::Tensor tensor;
  if (form == Form::Dense && fields.size == 7) {
    tensor = unpack_dense(fields);
  } else if (form == Form::Coo && fields.size == 6 &&
             fields.ptr[2].type == msgpack::type::BOOLEAN) {
    const auto indices = indices_of(*this, fields.ptr[4]);
    const auto values = part_of(*this, fields.ptr[5]);
    const auto sizes = integers(fields.ptr[3], "sizes");
    const bool coalesced = fields.ptr[2].via.boolean;
    check_coo(indices, values, sizes, coalesced);
    tensor = at::sparse_coo_tensor(indices, values, sizes, values.options().layout(at::kSparse))
                 ._coalesced_(coalesced);
  } else if (form == Form::Compressed && fields.size == 7) {
    const auto layout = number(fields.ptr[2], "layout");
    if (layout >= std::size(kCompressed)) foreign("invalid layout");
    const auto compressed = indices_of(*this, fields.ptr[4]);
    const auto plain = indices_of(*this, fields.ptr[5]);
    const auto values = compressed_values_of(*this, fields.ptr[6], kCompressed[layout]);
    const auto sizes = integers(fields.ptr[3], "sizes");
    at::_validate_sparse_compressed_tensor_args(compressed, plain, values, sizes,
                                                kCompressed[layout]);
    tensor = at::sparse_compressed_tensor(compressed, plain, values, sizes,
                                          values.options().layout(kCompressed[layout]));
  } else {
    foreign("invalid form");
  }
  if (!has_slot && !gradient.via.boolean) return tensor;
  if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type()))
    foreign("invalid gradient");
  if (slot > 0 && attach_) {
    attach_(tensor, slot - 1);
  } else {
    tensor.requires_grad_();
    if (has_slot && slot == 0 && on_computed_) on_computed_(tensor);
  }
  return tensor;
}

at::Tensor TensorReader::unpack_dense(const msgpack::object_array& fields) const {
  const auto code = number(fields.ptr[2], "dtype");
  const auto storage = number(fields.ptr[3], "storage");
  const auto begin = number(fields.ptr[4], "offset");
  const auto sizes = integers(fields.ptr[5], "sizes");
  const auto strides = integers(fields.ptr[6], "strides");
  if (code >= std::size(kTypes) || sizes.size() != strides.size() || storage > parts_.size())
    foreign("invalid dtype, strides or storage");
  const auto type = kTypes[code];
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  if (storage == 0) {
    if (!empty) foreign("it has elements and no storage");
    return at::empty_strided(sizes, strides, at::TensorOptions(at::kCPU).dtype(type));
  }
  const Part& part = parts_[storage - 1];
  if (empty) return over(part, type, sizes, strides, 0);  // the part's storage tells the device
  const std::uint64_t element = c10::elementSize(type);
  const auto elements = extent(sizes, strides);
  std::uint64_t bytes = 0;
  if (!elements || __builtin_mul_overflow(*elements, element, &bytes) || begin < part.begin ||
      (begin - part.begin) % element != 0 || begin - part.begin > part.bytes ||
      bytes > part.bytes - (begin - part.begin)) {
    foreign("it reaches beyond its storage");
  }
  return over(part, type, sizes, strides, (begin - part.begin) / element);
}

}  // namespace weft::codec
