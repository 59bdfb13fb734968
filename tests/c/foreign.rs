// kvleaf from Rust by its header alone: declarations copied from it, and nothing else.
use std::ffi::{c_char, c_void, CStr};

#[repr(C)]
struct PageSpec {
    struct_size: usize,
    name: *const c_char,
    bytes_per_page: u64,
    stride_alignment: u64,
    weight: f64,
    floor: u64,
    ceiling: u64,
    has_ceiling: u32,
    one_per_request: u32,
}
#[repr(C)]
#[derive(Default)]
struct ByteRange {
    begin: u64,
    end: u64,
}
#[link(name = "kvleaf_c")]
extern "C" {
    fn kvleaf_abi_version() -> u32;
    fn kvleaf_last_error() -> *const c_char;
    fn kvleaf_plan_geometry(budget: u64, pages: *const PageSpec, count: usize, max_huge: u64,
                            alignment: u64, out: *mut *mut c_void) -> i32;
    fn kvleaf_geometry_byte_range(geometry: *const c_void, leaf: u32, block: u32,
                                  out: *mut ByteRange) -> i32;
    fn kvleaf_geometry_destroy(geometry: *mut c_void);
    fn kvleaf_pool_create(geometry: *const c_void, max_huge: u64, out: *mut *mut c_void) -> i32;
    fn kvleaf_pool_allocate(pool: *mut c_void, leaf: u32, fate: i32, hint: i64,
                            out: *mut u32) -> i32;
    fn kvleaf_pool_free(pool: *mut c_void, leaf: u32, block: u32) -> i32;
    fn kvleaf_pool_audit(pool: *const c_void) -> i32;
    fn kvleaf_pool_destroy(pool: *mut c_void);
}

fn page(name: &'static [u8], bytes_per_page: u64) -> PageSpec {
    PageSpec {
        struct_size: std::mem::size_of::<PageSpec>(),
        name: name.as_ptr() as *const c_char,
        bytes_per_page,
        stride_alignment: 0,
        weight: 0.0,
        floor: 0,
        ceiling: 0,
        has_ceiling: 0,
        one_per_request: 0,
    }
}

fn main() {
    let pages = [page(b"attention\0", 64 << 10), page(b"state\0", 1 << 20)];
    let (mut geometry, mut pool) = (std::ptr::null_mut(), std::ptr::null_mut());
    let mut range = ByteRange::default();
    let mut block = 0u32;
    unsafe {
        assert_eq!(kvleaf_abi_version(), 1);
        assert_eq!(kvleaf_plan_geometry(1 << 20, pages.as_ptr(), 2, 0, 0, &mut geometry), 2);
        let message = CStr::from_ptr(kvleaf_last_error()).to_str().unwrap();
        assert!(message.contains("state") && geometry.is_null(), "{message}");
        assert_eq!(kvleaf_plan_geometry(8 << 20, pages.as_ptr(), 2, 0, 0, &mut geometry), 0);
        assert_eq!(kvleaf_pool_create(geometry, 0, &mut pool), 0);
        assert_eq!(kvleaf_pool_allocate(pool, 0, 0, -1, &mut block), 0);
        assert_eq!(kvleaf_geometry_byte_range(geometry, 0, block, &mut range), 0);
        assert!(block > 0 && range.end - range.begin == 64 << 10);
        kvleaf_geometry_destroy(geometry);
        assert_eq!(kvleaf_pool_free(pool, 0, block), 0);
        assert_eq!(kvleaf_pool_free(pool, 0, block), 4);
        assert_eq!(kvleaf_pool_audit(pool), 0);
        kvleaf_pool_destroy(pool);
    }
    println!("1 passed, 0 failed");
}
