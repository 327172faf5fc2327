/* Stands for RDMA's libibverbs.so.1 where there is none. Mooncake is linked against it and asks it for devices,
   of which there are none: then it transfers over TCP, and calls nothing else of these. */
#define NONE(name) long name(void) { return 0; }
NONE(_ibv_query_gid_ex) NONE(ibv_ack_async_event) NONE(ibv_ack_cq_events) NONE(ibv_alloc_pd)
NONE(ibv_close_device) NONE(ibv_create_comp_channel) NONE(ibv_create_cq) NONE(ibv_create_qp)
NONE(ibv_dealloc_pd) NONE(ibv_dereg_mr) NONE(ibv_destroy_comp_channel) NONE(ibv_destroy_cq)
NONE(ibv_destroy_qp) NONE(ibv_event_type_str) NONE(ibv_fork_init) NONE(ibv_free_device_list)
NONE(ibv_get_async_event) NONE(ibv_get_cq_event) NONE(ibv_get_device_list) NONE(ibv_get_device_name)
NONE(ibv_modify_qp) NONE(ibv_open_device) NONE(ibv_query_device) NONE(ibv_query_gid) NONE(ibv_query_port)
NONE(ibv_query_qp) NONE(ibv_reg_mr) NONE(ibv_reg_mr_iova2) NONE(ibv_wc_status_str)
