from masflow import workflow

ROLES = {"clerk": {"prompt": "Answer {{ question }}", "handoff": {"push": "other", "to": "state.stack"}}}


@workflow(task={"question": "str", "gold": "str"}, roles=ROLES)
async def main(task, agents, ctx):
    return await agents.clerk()
