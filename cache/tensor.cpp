#include "kvleaf/cache/tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace kvleaf {
namespace {

DLDataType dlpack_type(DType dtype) noexcept {
  const auto bits = static_cast<std::uint8_t>(size_of(dtype) * 8);
  const auto type = [&](int code) { return DLDataType{static_cast<std::uint8_t>(code), bits, 1}; };
  switch (dtype) {
    case DType::uint8: return type(kDLUInt);
    case DType::int8:
    case DType::int32:
    case DType::int64: return type(kDLInt);
    case DType::float16:
    case DType::float32: return type(kDLFloat);
    case DType::bfloat16: return type(kDLBfloat);
    case DType::float8_e4m3: return type(kDLFloat8_e4m3fn);
    case DType::float8_e5m2: return type(kDLFloat8_e5m2);
  }
  return type(kDLUInt);
}

DType dtype_of_dlpack(DLDataType type) {
  for (const DType dtype :
       {DType::uint8, DType::int8, DType::int32, DType::int64, DType::float16, DType::bfloat16,
        DType::float32, DType::float8_e4m3, DType::float8_e5m2}) {
    const DLDataType ours = dlpack_type(dtype);
    if (ours.code == type.code && ours.bits == type.bits && type.lanes == 1) return dtype;
  }
  throw InvalidArgument(fmt::format(
      "a DLPack tensor with elements of code {}, {} bits, {} lanes; expected uint8, int8, int32, "
      "int64, float16, bfloat16, float32, float8_e4m3 or float8_e5m2",
      type.code, type.bits, type.lanes));
}

/// What an exported tensor points to.
struct Export {
  Tensor view;
  Extents shape;
  Extents strides;
};

DLTensor describe(Export& held) {
  DLTensor tensor{};
  tensor.data = held.view.data();
  tensor.device = dlpack_device(held.view.device());
  tensor.ndim = static_cast<std::int32_t>(held.shape.size());
  tensor.dtype = dlpack_type(held.view.dtype());
  tensor.shape = held.shape.data();
  tensor.strides = held.strides.data();
  return tensor;
}

std::unique_ptr<Export> hold(const Tensor& tensor) {
  auto held = std::make_unique<Export>();
  held->view = tensor;
  held->shape.assign(tensor.shape().begin(), tensor.shape().end());
  held->strides.assign(tensor.strides().begin(), tensor.strides().end());
  return held;
}

template <class Managed>
class Imported : public TensorOwner {
 public:
  explicit Imported(Managed* given) : given_(given) {}
  ~Imported() override {
    if (given_->deleter != nullptr) given_->deleter(given_);
  }

 private:
  Managed* given_;
};

template <class Managed>
Tensor take(Managed* given) {
  if (given == nullptr) throw InvalidArgument("a DLPack tensor that is null");
  const DLTensor& source = given->dl_tensor;
  const DType dtype = dtype_of_dlpack(source.dtype);
  Device device;
  switch (source.device.device_type) {
    case kDLCPU:
    case kDLCUDAHost: break;
    case kDLCUDA:
    case kDLCUDAManaged: device = {Device::Kind::cuda, source.device.device_id}; break;
    default:
      throw InvalidArgument(
          fmt::format("a DLPack tensor on a device of type {}; expected the CPU or CUDA",
                      static_cast<int>(source.device.device_type)));
  }
  if (source.ndim < 0 || source.ndim > static_cast<std::int32_t>(max_tensor_rank))
    throw InvalidArgument(fmt::format("a DLPack tensor of {} dimensions; expected at most {}",
                                      source.ndim, max_tensor_rank));
  const auto rank = static_cast<std::size_t>(source.ndim);
  const std::span<const std::int64_t> shape(source.shape, rank);
  std::span<const std::int64_t> strides;
  if (source.strides != nullptr) strides = {source.strides, rank};
  auto* data = static_cast<std::byte*>(source.data) + source.byte_offset;
  Tensor unowned(data, shape, strides, dtype, device);  // throws before anything is taken over
  return Tensor(data, unowned.shape(), unowned.strides(), dtype, device,
                std::make_shared<Imported<Managed>>(given));
}

}  // namespace

Tensor::Tensor(std::byte* data, std::span<const std::int64_t> shape,
               std::span<const std::int64_t> strides, DType dtype, Device device,
               std::shared_ptr<TensorOwner> owner)
    : data_(data), dtype_(dtype), device_(device), owner_(std::move(owner)), defined_(true) {
  if (shape.size() > max_tensor_rank)
    throw InvalidArgument(fmt::format("a tensor of {} dimensions; expected at most {}",
                                      shape.size(), max_tensor_rank));
  if (!strides.empty() && strides.size() != shape.size())
    throw InvalidArgument(
        fmt::format("a tensor of {} dimensions with {} strides", shape.size(), strides.size()));
  for (const std::int64_t extent : shape)
    if (extent < 0)
      throw InvalidArgument(
          fmt::format("a tensor of shape [{}]; no extent may be negative", fmt::join(shape, ", ")));
  shape_.assign(shape.begin(), shape.end());
  if (!strides.empty()) {
    strides_.assign(strides.begin(), strides.end());
    return;
  }
  strides_.resize(shape_.size(), 1);
  for (std::size_t d = shape_.size(); d-- > 1;) strides_[d - 1] = strides_[d] * shape_[d];
}

Tensor Tensor::of(std::span<const std::int32_t> values) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(values.size())};
  return Tensor(reinterpret_cast<std::byte*>(const_cast<std::int32_t*>(values.data())), shape, {},
                DType::int32);
}
Tensor Tensor::of(std::span<const std::int64_t> values) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(values.size())};
  return Tensor(reinterpret_cast<std::byte*>(const_cast<std::int64_t*>(values.data())), shape, {},
                DType::int64);
}

std::byte* Tensor::data() const {
  if (!defined_) throw InvalidArgument("an undefined tensor has no data");
  if (stale())
    throw StepError(fmt::format(
        "this view of {} is stale: its cache was reset, or went on, since it was handed out; ask "
        "for another",
        to_string()));
  return data_;
}

void Tensor::check_element(std::size_t bytes) const {
  if (bytes != size_of(dtype_))
    throw InvalidArgument(fmt::format("elements of {} B read from a tensor of {}, {} B each", bytes,
                                      name_of(dtype_), size_of(dtype_)));
}

std::int64_t Tensor::size() const noexcept {
  if (!defined_) return 0;
  std::int64_t count = 1;
  for (const std::int64_t extent : shape_) count *= extent;
  return count;
}

bool Tensor::contiguous() const noexcept {
  std::int64_t wanted = 1;
  for (std::size_t d = shape_.size(); d-- > 0;) {
    if (shape_[d] != 1 && strides_[d] != wanted) return false;
    wanted *= shape_[d];
  }
  return true;
}

Tensor Tensor::at(std::initializer_list<std::int64_t> index) const {
  std::byte* first = data();
  if (index.size() > shape_.size())
    throw InvalidArgument(fmt::format("{} indices into {}", index.size(), to_string()));
  std::size_t d = 0;
  for (const std::int64_t i : index) {
    if (i < 0 || i >= shape_[d])
      throw InvalidArgument(fmt::format("index {} in dimension {} of {}", i, d, to_string()));
    first += i * strides_[d++] * static_cast<std::int64_t>(size_of(dtype_));
  }
  return Tensor(first, shape().subspan(d), strides().subspan(d), dtype_, device_, owner_);
}

Tensor Tensor::permuted(std::span<const std::size_t> order) const {
  Tensor view = *this;
  std::uint32_t seen = 0;
  if (order.size() != shape_.size())
    throw InvalidArgument(fmt::format("{} dimensions named of {}", order.size(), to_string()));
  std::size_t d = 0;
  for (const std::size_t from : order) {
    if (from >= shape_.size() || (seen >> from & 1u) != 0)
      throw InvalidArgument(fmt::format("[{}] is no order of the {} dimensions of {}",
                                        fmt::join(order, ", "), shape_.size(), to_string()));
    seen |= 1u << from;
    view.shape_[d] = shape_[from];
    view.strides_[d++] = strides_[from];
  }
  return view;
}

std::string Tensor::to_string() const {
  if (!defined_) return "undefined";
  return fmt::format("{} [{}] on {}", name_of(dtype_), fmt::join(shape_, ", "),
                     kvleaf::to_string(device_));
}

DLDevice dlpack_device(Device device) noexcept {
  return {device.kind == Device::Kind::cpu ? kDLCPU : kDLCUDA, device.index};
}

DLManagedTensor* to_dlpack(const Tensor& tensor) {
  auto held = hold(tensor);
  auto managed = std::make_unique<DLManagedTensor>();
  managed->dl_tensor = describe(*held);
  managed->manager_ctx = held.release();
  managed->deleter = [](DLManagedTensor* self) {
    delete static_cast<Export*>(self->manager_ctx);
    delete self;
  };
  return managed.release();
}

DLManagedTensorVersioned* to_dlpack_versioned(const Tensor& tensor) {
  auto held = hold(tensor);
  auto managed = std::make_unique<DLManagedTensorVersioned>();
  managed->version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed->dl_tensor = describe(*held);
  managed->flags = 0;
  managed->manager_ctx = held.release();
  managed->deleter = [](DLManagedTensorVersioned* self) {
    delete static_cast<Export*>(self->manager_ctx);
    delete self;
  };
  return managed.release();
}

Tensor from_dlpack(DLManagedTensor* given) { return take(given); }
Tensor from_dlpack(DLManagedTensorVersioned* given) {
  if (given != nullptr && given->version.major != DLPACK_MAJOR_VERSION)
    throw InvalidArgument(fmt::format("a tensor of DLPack {}.{}; expected version {}",
                                      given->version.major, given->version.minor,
                                      DLPACK_MAJOR_VERSION));
  return take(given);
}

}  // namespace kvleaf
